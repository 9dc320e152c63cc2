"""Spark behind the engine: the shared session, results as DataFrames, DataFrames as results."""
