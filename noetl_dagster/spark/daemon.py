"""Spark's Python daemon with this project's imports done before it forks.

Spark forks a Python worker for each planner call and task of a data source. Importing the storage layer
takes seconds of processor time; done here it is paid once for each kind of worker, not once for each fork.
"""

from pyspark.daemon import manager

import noetl_dagster.spark.replay
import noetl_dagster.spark.sources.results

PRELOADED = (noetl_dagster.spark.sources.results, noetl_dagster.spark.replay)

if __name__ == "__main__":
    manager()
