"""Spark behind the engine: the shared session, results as DataFrames, and DataFrames as results."""
