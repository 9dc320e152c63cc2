"""Executions as runs of Dagster's own instance: its coordinator queues them, its run launcher makes their pods.

``jobs`` finds the job of a playbook in the code locations of a workspace, ``executions`` is the API's launcher. Gives
``WorkspaceLauncher`` to ``noetl-dagster serve``. Stands on ``tags``.
"""
