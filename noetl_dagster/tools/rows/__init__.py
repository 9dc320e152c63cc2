"""Rows as files, as COPY text, as parameters of PostgreSQL and as JSON values; watermarks of rows."""

CHUNK_ROWS = 50_000
"""Rows that make a chunk, however small they are: as objects, each takes several hundred bytes."""
