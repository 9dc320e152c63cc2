"""Databases behind DB-API, from SQLite to Snowflake: one tool, one binding of parameters, one meaning of errors."""
