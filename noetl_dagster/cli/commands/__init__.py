"""The commands, one module a family.

Each is loaded when it is called, so that ``--help`` and ``check`` never pay for Dagster or Spark. Gives
typer functions to ``app``, by name. Stands on ``api``, ``console``, ``doctor``, ``health``, ``progress``, ``session``,
``service_processes`` and ``stores``.
"""
