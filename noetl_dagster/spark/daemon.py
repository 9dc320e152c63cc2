"""Spark's Python daemon, which forks the processes that plan and run a data source or call Python functions.

Spark starts a daemon for each module of workers and passes the module as the first argument. Planners (of
``pyspark.sql.worker``) all load the data source, so it is imported once before they are forked. Processes of
tasks mostly call a user's functions. They are reused, so they import what they need themselves.
"""

import importlib
import sys

PLANNERS = "pyspark.sql.worker."
SOURCE = "noetl_dagster.spark.results"


def preload(worker_module: str) -> None:
    """Imports the modules that every process of a daemon needs."""
    if worker_module.startswith(PLANNERS):
        importlib.import_module(SOURCE)


if __name__ == "__main__":
    preload(sys.argv[1] if len(sys.argv) > 1 else "")
    from pyspark.daemon import manager

    manager()
