"""Results that are larger than memory: rows as they come, and stored rows laid down as files.

Gives streams to ``PostgresTool`` and files to the views of DuckDB. Stands on ``connection``, ``cursor``, ``running``,
``statements`` and ``tables``.
"""
