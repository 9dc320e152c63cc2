"""Dagster executors that any job may use, and the executor and storages of playbook jobs.

``threaded_executor`` runs ready steps side by side on threads of the run's own process.
"""

from noetl_dagster.compiler.executors.threaded import threaded_executor

__all__ = ["threaded_executor"]
