"""Dagster resources: the engine of this process, and the Spark session."""
