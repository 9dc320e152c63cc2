"""Databases behind DB-API: SQLite and MySQL, with one tool, one binding of parameters and one meaning of errors."""
