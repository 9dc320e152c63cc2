"""The commands, each imported when it is called: ``--help`` and ``check`` import neither Dagster nor Spark."""
