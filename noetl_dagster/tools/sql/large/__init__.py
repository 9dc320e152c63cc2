"""Results that are larger than memory: rows as they come, and stored rows laid down as files.

Gives streams to ``PostgresTool`` and files to the views of DuckDB. Stands on ``base``, ``chunks``, ``rows`` and the
statements of ``sql``.
"""
