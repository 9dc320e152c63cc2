"""Preloaded processes from which Dagster runs start by fork, and Dagster's launchers and compute logs.

``server`` is the run server, and ``driver`` the process that it forks. Runs come from Dagster's run launcher
(``warm``), the HTTP API and the command line (``executions``), and the HTTP API in a cluster (``workspace``).
"""
