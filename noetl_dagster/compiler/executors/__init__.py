"""Dagster executors that any job may use, and Dagster's storages for them.

Gives ``threaded_executor``, ready steps side by side on threads of the run's own process, to the compiler and to
projects of others, and ``dagster.yaml`` its storage. Stands on ``embedded``.
"""

from noetl_dagster.compiler.executors.threaded import threaded_executor

__all__ = ["threaded_executor"]
