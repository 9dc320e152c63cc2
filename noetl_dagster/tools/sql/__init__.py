"""SQL: statements and their parameters, PostgreSQL and DuckDB, and results as views of DuckDB."""
