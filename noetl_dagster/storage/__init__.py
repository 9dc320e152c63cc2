"""Results: the store that chooses between tiers, manifests of parts, and what removes them.

Gives ``ResultStore`` to the data and the control plane, and synchronous access by URI to Spark and DuckDB.
Stands on ``events`` and ``playbook``.
"""
