"""SQLite, in this process: the standard library's driver."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ErrorKind
from noetl_dagster.tools.sql.databases.base import Database, Failure
from noetl_dagster.tools.sql.tables import conflict_clause

IN_MEMORY = ":memory:"
BUSY_SECONDS = 10.0
"""How long a statement waits for the lock of another connection. It cannot be interrupted meanwhile."""

_KINDS: tuple[tuple[str, ErrorKind, bool], ...] = (
    ("SQLITE_CONSTRAINT", "db_constraint", False),
    ("SQLITE_MISMATCH", "db_constraint", False),
    ("SQLITE_BUSY", "db_timeout", True),
    ("SQLITE_LOCKED", "db_timeout", True),
    ("SQLITE_INTERRUPT", "db_timeout", False),
    ("SQLITE_CANTOPEN", "db_connection", False),
    ("SQLITE_NOTADB", "db_connection", False),
    ("SQLITE_AUTH", "auth", False),
    ("SQLITE_PERM", "auth", False),
    ("SQLITE_READONLY", "auth", False),
    ("SQLITE_IOERR", "storage", True),
    ("SQLITE_CORRUPT", "storage", False),
    ("SQLITE_FULL", "storage_quota", False),
)
"""The kinds of errors by the beginning of their names; any other is of kind ``db``."""


class SqliteDatabase(Database):
    """A database in a file, which is made if it is missing, or in memory for one call."""

    dialect = "sqlite"
    placeholder = "?"
    same = "IS"
    insert_new = "INSERT OR IGNORE INTO"
    errors = (sqlite3.Error, sqlite3.Warning, OverflowError)
    simple_types = (str, float, bytes)

    def __init__(self, path: str) -> None:
        self._path = path

    def connect(self) -> Any:
        """Opens the file, and checks foreign keys."""
        if self._path != IN_MEMORY:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        # transactions begin where the call begins them; a connection goes from thread to thread, never to two at once
        connection = sqlite3.connect(self._path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def begin(self, connection: Any, *, reads: bool) -> None:
        """Begins a transaction, which locks the file for other writers if it changes anything."""
        # a transaction that reads first and then writes would fail at once if another one has written between
        connection.execute("BEGIN" if reads else "BEGIN IMMEDIATE")

    def execute(self, connection: Any, text: str, values: Any = ()) -> Any:
        """Runs a statement; returns its cursor."""
        return connection.execute(text, tuple(map(self.value, values)))

    def close(self, connection: Any) -> None:
        """Undoes an open transaction, which a statement that is still referenced would keep open, and closes."""
        if connection.in_transaction:
            connection.rollback()
        connection.close()

    def interrupt(self, connection: Any) -> None:
        """Interrupts the statement that another thread runs."""
        connection.interrupt()

    def upsert(self, keys: Sequence[str], columns: Sequence[str]) -> str:
        """Returns ``ON CONFLICT`` of unique columns."""
        return conflict_clause(keys, columns)

    def failure(self, error: BaseException) -> Failure:
        """Returns the meaning of an error by its name."""
        name = str(getattr(error, "sqlite_errorname", "") or "")
        for start, kind, retryable in _KINDS:
            if name.startswith(start):
                return Failure(kind, name, retryable)
        return Failure("schema" if isinstance(error, OverflowError) else "db", name or None)
