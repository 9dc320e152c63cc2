"""Tables of PostgreSQL: their description, modes of writing to them, and SQL with their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.rows.jsonable import to_jsonable

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


async def delete_rows(connection: asyncpg.Connection, table: SqlTable, identity: Mapping[str, Any]) -> None:
    """Deletes the rows of the same identity; all rows without one."""
    if not identity:
        await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
        return
    same = " AND ".join(f"target.{name} = own.{name}" for name in map(quoted, identity))
    await connection.execute(DELETE_OWN_ROWS.format(table=table.name, same=same), to_jsonable(identity))


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
