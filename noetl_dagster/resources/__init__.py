"""Dagster resources: the engine of a process, and Spark."""
