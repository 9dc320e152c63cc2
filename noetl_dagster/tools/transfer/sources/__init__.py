"""Where a transfer reads: PostgreSQL, DuckDB, files and objects, http page by page, results by reference.

Gives ``open_source`` in ``opening`` to the tool, and what COPY gives to the target. Stands on ``chunks``, ``places``.
"""
