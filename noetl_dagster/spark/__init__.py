"""Spark behind the engine: the shared session, results as DataFrames, DataFrames as results.

Gives sessions, frames and datasets to the spark tool and the fan-out's Spark engine, a replay to the
command line. Stands on ``events`` and ``storage``.
"""
