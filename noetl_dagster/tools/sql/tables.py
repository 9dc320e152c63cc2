"""Tables of SQL databases: their columns, how they are written, and columns that rows have and tables lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.values import admit

SELECT_COLUMNS = """
SELECT attribute.attname AS name,
       type.typname AS type,
       coalesce(attribute.attnum = ANY (key.indkey), false) AS in_key
FROM pg_attribute AS attribute
JOIN pg_type AS type ON type.oid = attribute.atttypid
LEFT JOIN pg_index AS key ON key.indrelid = attribute.attrelid AND key.indisprimary
WHERE attribute.attrelid = to_regclass($1)
  AND attribute.attnum > 0 AND NOT attribute.attisdropped AND attribute.attgenerated = ''
ORDER BY attribute.attnum
"""

# {table} and {columns} are quoted identifiers; the values travel as one bound parameter
DELETE_OWN_ROWS = (
    "DELETE FROM {table} AS target USING jsonb_populate_record(NULL::{table}, $1::jsonb) AS own WHERE {same}"
)
# another worker may add the same column, for which this one waits
ADD_COLUMN = "ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column} {type}"
TYPE_NAME = """
SELECT typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
WHERE attrelid = to_regclass($1) AND attname = $2
"""
DELETE_ALL_ROWS = "DELETE FROM {table}"

COLUMNS_OF_QUERY = "noetl_columns"
CREATE_COLUMNS = "CREATE TEMP TABLE {table} AS {query}\nWITH NO DATA"
SELECT_DECIMALS = """
SELECT attname, (atttypmod - 4) >> 16, ((atttypmod - 4 & 2047) # 1024) - 1024 FROM pg_attribute
WHERE attrelid = to_regclass($1) AND atttypid = 'numeric'::regtype AND atttypmod > 0
"""


class WriteMode(StrEnum):
    """The ways to write rows."""

    APPEND = "append"
    REPLACE = "replace"
    UPSERT = "upsert"


@dataclass(frozen=True, slots=True)
class SqlTable:
    """A table as the server describes it. ``name`` is quoted."""

    name: str
    columns: dict[str, str]
    primary_key: tuple[str, ...]


def write_mode(text: str) -> WriteMode:
    """Parses a mode; raises ``ToolError`` if it is unknown."""
    try:
        return WriteMode(text.strip().lower())
    except ValueError:
        raise ToolError(f"mode {text!r} is unknown; known modes: {', '.join(WriteMode)}", kind="schema") from None


async def describe_table(connection: asyncpg.Connection, name: str) -> SqlTable:
    """Looks a table up, whose name may have a schema before a dot; raises ``ToolError`` if there is none."""
    identifier = sql_identifier(name)
    columns = await connection.fetch(SELECT_COLUMNS, identifier)
    if not columns:
        state = "42P01"
        raise ToolError(
            f"table {name} does not exist; create it before writing to it",
            kind="schema",
            code=state,
            details={"pg": {"sqlstate": state, "code": state}},
        )
    return SqlTable(
        identifier,
        {column["name"]: column["type"] for column in columns},
        tuple(column["name"] for column in columns if column["in_key"]),
    )


async def declared_decimals(
    connection: asyncpg.Connection, types: Mapping[str, str], query: str, values: Sequence[Any], table: str = ""
) -> dict[str, tuple[int, int]]:
    """Returns the precision and scale of the columns of a query that declare them, in an open transaction.

    asyncpg does not report them. An empty temporary table does, unless the server or role allows none.

    Args:
        types: of the columns.
        table: quoted, if the query reads just this one.
    """
    if "numeric" not in types.values():
        return {}
    savepoint = connection.transaction()
    await savepoint.start()
    try:
        if not table:
            text = CREATE_COLUMNS.format(table=COLUMNS_OF_QUERY, query=query.rstrip().rstrip(";"))
            await connection.execute(text, *values)
        rows = await connection.fetch(SELECT_DECIMALS, table or f"pg_temp.{COLUMNS_OF_QUERY}")
        return {name: (precision, scale) for name, precision, scale in rows}
    except asyncpg.PostgresError:
        return {}
    finally:
        await savepoint.rollback()


async def delete_rows(connection: asyncpg.Connection, table: SqlTable, identity: Mapping[str, Any]) -> None:
    """Deletes the rows of the same identity; all rows without one."""
    if not identity:
        await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
        return
    same = " AND ".join(f"target.{name} = own.{name}" for name in map(quoted, identity))
    await connection.execute(DELETE_OWN_ROWS.format(table=table.name, same=same), admit(identity))


async def add_columns(connection: asyncpg.Connection, table: SqlTable, columns: Mapping[str, str]) -> None:
    """Adds columns, by name and type, to a table and to its description."""
    for name, type_name in columns.items():
        await connection.execute(ADD_COLUMN.format(table=table.name, column=quoted(name), type=type_name))
        table.columns[name] = await connection.fetchval(TYPE_NAME, table.name, name)


def upsert_key(table: SqlTable, key: Sequence[str]) -> Sequence[str]:
    """Returns the unique columns of an upsert, by default the primary key; raises ``ToolError`` without any."""
    keys = key or table.primary_key
    if not keys:
        raise ToolError(
            f"table {table.name} has no primary key, so an upsert needs 'key': its unique columns",
            kind="schema",
        )
    return keys


def conflict_clause(keys: Sequence[str], columns: Sequence[str]) -> str:
    """Returns ``ON CONFLICT`` that updates every column that is no key."""
    changed = [name for name in columns if name not in keys]
    if not changed:
        return f" ON CONFLICT ({listed(keys)}) DO NOTHING"
    updates = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in changed)
    return f" ON CONFLICT ({listed(keys)}) DO UPDATE SET {updates}"


def listed(columns: Iterable[str]) -> str:
    """Returns quoted column names, separated by commas."""
    return ", ".join(map(quoted, columns))


def quoted(name: str) -> str:
    """Returns a name as a quoted identifier; a dot in it is part of the name."""
    return '"' + name.replace('"', '""') + '"'


class OnDrift(StrEnum):
    """The treatment of a column that the target lacks; ``fail`` is another word for ``error``."""

    ERROR = "error"
    IGNORE = "ignore"
    ADD = "add"

    @classmethod
    def _missing_(cls, value: object) -> OnDrift | None:
        return cls.ERROR if value == "fail" else None


class Drift:
    """Applies :class:`OnDrift` to columns that the target lacks.

    Args:
        target: for errors.
        remedy: what to write instead, for errors.

    Attributes:
        columns: those of the target; None: those of the first chunk.
        added: new columns with their types.
        ignored: columns that are left out.
    """

    def __init__(
        self,
        on_drift: OnDrift,
        target: str,
        columns: Iterable[str] | None = None,
        *,
        remedy: str = "on_drift: add or ignore, or name the columns to read",
    ) -> None:
        self._on_drift, self._target, self._remedy = on_drift, target, remedy
        self.columns = None if columns is None else list(columns)
        self.added: dict[str, str] = {}
        self.ignored: list[str] = []

    def sort(self, columns: Sequence[str], type_of: Callable[[str], str]) -> tuple[list[str], dict[str, str]]:
        """Returns the columns to write, and the types of those that the target does not have yet.

        Raises ``ToolError`` if the target lacks columns, and none are to be added or ignored.
        """
        existing = self.columns = list(columns) if self.columns is None else self.columns
        new = [name for name in columns if name not in existing]
        if new and self._on_drift is OnDrift.ERROR:
            raise ToolError(
                f"{self._target} has no column {', '.join(map(str, new))}; its columns: {', '.join(existing)}. Write "
                f"{self._remedy}",
                kind="schema",
                code="42703",
            )
        if self._on_drift is OnDrift.IGNORE:
            self.ignored += [name for name in new if name not in self.ignored]
            return [name for name in columns if name not in new], {}
        types = {name: type_of(name) for name in new}
        existing += new
        self.added |= types
        return list(columns), types

    def report(self) -> dict[str, list[str]]:
        """Returns the added and ignored columns for the result, if there are any."""
        named = {"added": list(self.added), "ignored": self.ignored}
        return {word: names for word, names in named.items() if names}


def drift_of_sink(on_new_column: str | None, target: str, columns: Iterable[str]) -> Drift:
    """Returns what applies ``on_new_column`` of a sink, by default ``fail``; raises ``ToolError`` for another word."""
    try:
        on_drift = OnDrift(str(on_new_column or OnDrift.ERROR).strip().lower())
    except ValueError:
        raise ToolError(
            f"on_new_column: {on_new_column!r} is unknown; write add, ignore or fail", kind="schema"
        ) from None
    remedy = "on_new_column: add or ignore, or name the columns to write with 'args'"
    return Drift(on_drift, target, columns, remedy=remedy)


def kind_of_value(value: Any) -> str:
    """Returns the kind of a value that is not null, for :func:`type_of_kinds`."""
    name = type(value).__name__
    return "Decimal" if name == "int" and not -(1 << 63) <= value < 1 << 63 else name


def type_of_kinds(kinds: Iterable[str]) -> str:
    """Returns the PostgreSQL type of a column whose values are of these kinds."""
    return _TYPES_OF_VALUES.get(frozenset(kinds), "text")


_TYPES_OF_VALUES: Mapping[frozenset[str], str] = {
    frozenset({"bool"}): "boolean",
    frozenset({"int"}): "bigint",
    frozenset({"float"}): "double precision",
    frozenset({"int", "float"}): "double precision",
    frozenset({"Decimal"}): "numeric",
    frozenset({"int", "Decimal"}): "numeric",
    frozenset({"datetime"}): "timestamptz",
    frozenset({"date"}): "date",
    frozenset({"time"}): "time",
    frozenset({"timedelta"}): "interval",
    frozenset({"bytes"}): "bytea",
    frozenset({"UUID"}): "uuid",
    frozenset({"dict"}): "jsonb",
    frozenset({"list"}): "jsonb",
    frozenset({"dict", "list"}): "jsonb",
}
