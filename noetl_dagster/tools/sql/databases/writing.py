"""Writes rows into a table of a database behind DB-API. All functions run in the thread of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.sql.databases.base import DatabaseSession


class TableWriter:
    """A table that is written to, inside of a transaction.

    Attributes:
        columns: as the table spells them.
        where: the table, for errors.
    """

    def __init__(self, session: DatabaseSession, table: str) -> None:
        database, connection = session.database, session.connection
        self._session, self._database, self._connection = session, database, connection
        self._name = database.quoted(table)
        database.check_table(connection, table)
        cursor = database.execute(connection, f"SELECT * FROM {self._name} WHERE 1 = 0")
        self._types = {column[0]: column[1] for column in cursor.description}
        cursor.fetchall()
        self.columns = list(self._types)
        self.where = f"table {table}"
        self._folded = {name.casefold(): name for name in self.columns}

    def spelled(self, names: Iterable[str]) -> dict[str, str]:
        """Returns names of rows by the table's spelling, which ignores case; unknown ones as they are."""
        return {self._folded.get(name.casefold(), name): name for name in names}

    def insert(self, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], key: Sequence[str] = ()) -> int:
        """Inserts rows; returns the number that the table took.

        Args:
            names: column to name in the rows; a missing value is null.
            key: unique columns, by which rows that are there are updated.

        Raises:
            ToolError: the table lacks all of the columns, or one of them.
        """
        unknown = [name for name in names if name not in self._types]
        if unknown or not names:
            raise ToolError(
                f"{self.where} has no column {', '.join(unknown)}; its columns: {', '.join(self.columns)}. Name the "
                "columns to write"
                if unknown
                else f"{self.where}: the rows have none of its columns: {', '.join(self.columns)}",
                kind="schema",
            )
        database = self._database
        columns = ", ".join(map(database.quoted_part, names))
        text = f"INSERT INTO {self._name} ({columns}) VALUES "
        end = database.upsert(list(self.spelled(key)), list(names)) if key else ""
        if database.placeholder == "%s":
            text, end = text.replace("%", "%%"), end.replace("%", "%%")
        places = ", ".join([database.placeholder] * len(names))
        columns_of_rows = [(name, self._types[column]) for column, name in names.items()]
        values = [tuple(database.written(row.get(name), kind) for name, kind in columns_of_rows) for row in rows]
        cursor = database.cursor(self._connection)
        cursor.executemany(f"{text}({places}){end}", values)
        return len(rows) if key else int(cursor.rowcount)

    def delete(self, identity: Mapping[str, Any]) -> None:
        """Deletes the rows of the same identity; all rows without one."""
        database = self._database
        same = " AND ".join(f"{database.quoted_part(name)} {database.same} ?" for name in identity)
        self._session.fetch(f"DELETE FROM {self._name}" + (f" WHERE {same}" if same else ""), *identity.values())


def create_bookkeeping(session: DatabaseSession, statements: Sequence[str], purpose: str) -> None:
    """Creates tables of the platform that are missing; in MySQL this commits, so it comes before a transaction.

    Raises:
        ToolError: the user may not create them.
    """
    database = session.database
    for statement in statements:
        try:
            session.fetch(statement)
        except database.errors as error:
            failure = database.failure(error)
            raise ToolError(
                f"{session.where}: {database.text(error)}; {purpose} notes its progress in a table of the same "
                f"database, so let the user create it once: {statement}",
                kind=failure.kind,
                code=failure.code,
                retryable=failure.retryable,
            ) from None
