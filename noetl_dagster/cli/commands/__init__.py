"""The commands, one module for each family.

Each is imported when it is called, so that ``--help`` and ``check`` import neither Dagster nor Spark.
"""
