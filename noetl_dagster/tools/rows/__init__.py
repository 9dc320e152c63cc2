"""Rows as files, as COPY text, as parameters of PostgreSQL and as JSON values; watermarks of rows."""
