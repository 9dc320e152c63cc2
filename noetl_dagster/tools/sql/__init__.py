"""SQL: statements and their parameters, PostgreSQL, DuckDB, and sinks of results into tables."""
