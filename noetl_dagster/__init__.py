"""NoETL playbooks as Dagster assets: Dagster sees groups, PostgreSQL sees iterations, Spark sees rows."""

__version__ = "0.1.0"
