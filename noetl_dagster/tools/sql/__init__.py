"""SQL: statements and their parameters, PostgreSQL, DuckDB, and sinks of results into tables.

Gives ``PostgresTool`` and ``DuckdbTool`` to the registry, statements and cursors to transfer, sinks to the
data plane. Stands on ``access``, ``base``, ``chunks``, ``limits``, ``references``, ``rows`` and ``scripts``.
"""
