"""Dagster's words in a playbook.

Gives ``read_dagster`` to the playbook's root, and ``read_asset``, ``read_checks`` and ``read_sources`` to its
steps. Stands on ``block`` and ``spelling``.
"""
