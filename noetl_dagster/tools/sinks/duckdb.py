"""Parts as rows of a DuckDB table: staged in a schema of their own, moved into the table in one transaction.

Only one process can have a DuckDB file open for writing. The file is opened for the changes that wait and closed
again; while another process has it open, changes wait.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa
from pyarrow import dataset

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.rows.batches import StoredResult, batches_of
from noetl_dagster.tools.rows.files import arrow_rows, arrow_schema
from noetl_dagster.tools.sinks.place import PartPlace
from noetl_dagster.tools.sql.duckdb import kind_of_duckdb
from noetl_dagster.tools.sql.tables import WriteMode, listed

T = TypeVar("T")

WAIT_SECONDS = 60.0
"""Seconds to wait for another process that has the file open."""

PAUSE_SECONDS = 0.1

# Published parts: a part that arrives late, from a worker that was assumed dead, is not published again.
BOOKKEEPING = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.sink_part (target VARCHAR, part VARCHAR, published TIMESTAMPTZ DEFAULT now(),
                                            PRIMARY KEY (target, part));
"""
IS_PUBLISHED = "SELECT count(*) FROM noetl.sink_part WHERE target = ? AND part = ?"
PUBLISHED = "SELECT part FROM noetl.sink_part WHERE target = ? AND part IN (SELECT unnest(?::VARCHAR[]))"
NOTE_PUBLISHED = "INSERT INTO noetl.sink_part (target, part) VALUES (?, ?) ON CONFLICT DO NOTHING"
HAS_TABLE = """
SELECT count(*) FROM duckdb_tables()
WHERE schema_name = 'noetl' AND table_name = ? AND database_name = current_database()
"""

# {table} is the playbook's table, {staged} the one of its parts; both are quoted
ROWS = "CREATE OR REPLACE TEMP VIEW noetl_rows AS SELECT * {without} FROM noetl_given"
CREATE_TABLE = "CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM noetl_rows LIMIT 0"
CREATE_STAGED = (
    "CREATE TABLE IF NOT EXISTS {staged} AS SELECT ''::VARCHAR AS noetl_part, * FROM {table} LIMIT 0"
)
COLUMNS = "SELECT lower(column_name) FROM (DESCRIBE {table})"
TYPES = "SELECT lower(column_name), column_name, column_type FROM (DESCRIBE {table})"
CHANGED = """
SELECT {column}::VARCHAR FROM noetl_rows
WHERE TRY_CAST(TRY_CAST({column} AS {type}) AS {compared}) IS DISTINCT FROM TRY_CAST({column} AS {compared}) LIMIT 1
"""
FORGET = "DELETE FROM {staged} WHERE noetl_part = ?"
STAGE = "INSERT INTO {staged} BY NAME SELECT ? AS noetl_part, * FROM noetl_rows"
MOVE = "INSERT INTO {table} BY NAME SELECT * EXCLUDE (noetl_part) FROM {staged} WHERE noetl_part = ?"
EMPTY = "DELETE FROM {table}"
REPLACED = "DELETE FROM {table} AS old USING {staged} AS new WHERE noetl_part = ? AND {same}"
COUNT = "SELECT count(*) FROM {staged}"
DROP = "DROP TABLE {staged}"
PARTS = "SELECT DISTINCT noetl_part FROM {staged} WHERE starts_with(noetl_part, ?)"


@dataclass(slots=True)
class _Change:
    work: Callable[[duckdb.DuckDBPyConnection], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Queue:
    """The changes of one file: one connection at a time makes all waiting changes, each in a transaction."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: list[_Change] = field(default_factory=list)


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, _Queue]] = WeakKeyDictionary()
"""By event loop and file."""

_running: set[asyncio.Task[None]] = set()


class DuckdbParts:
    """A :class:`~noetl_dagster.tools.sinks.place.PartTarget` in a DuckDB file."""

    async def stage(self, place: PartPlace, result: Any) -> None:
        """Stages the rows in a table of the schema ``noetl``."""
        with tempfile.TemporaryDirectory(prefix="noetl-sink-") as folder:
            given = await _arrow_part(result, place.own, Path(folder, "rows.arrow"))
            await _change(place, lambda connection: _stage(connection, place, given))

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """Moves parts into the table; a part that was published before is left as it is."""

        def publish(connection: duckdb.DuckDBPyConnection) -> None:
            if not _has_staged(connection, target):
                return
            names = _names(target)
            for place in parts:
                if not _is_published(connection, place):
                    _delete_replaced(connection, place, names)
                    connection.execute(MOVE.format(**names), [place.part])
                    connection.execute(NOTE_PUBLISHED, [place.table, place.part])
                connection.execute(FORGET.format(**names), [place.part])
            _drop_if_empty(connection, names)

        await _change(target, publish)

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Returns the names of staged parts with a prefix."""

        def staged(connection: duckdb.DuckDBPyConnection) -> set[str]:
            if not _has_staged(connection, target):
                return set()
            return {
                name for (name,) in connection.execute(PARTS.format(**_names(target)), [prefix]).fetchall()
            }

        return await _change(target, staged)

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Returns the names of parts that are not recorded as published."""
        if not parts:
            return []
        names = [place.part for place in parts]

        def missing(connection: duckdb.DuckDBPyConnection) -> list[str]:
            found = connection.execute(PUBLISHED, [target.table, names]).fetchall()
            published = {name for (name,) in found}
            return [name for name in names if name not in published]

        return await _change(target, missing)

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        """Deletes staged parts."""

        def discard(connection: duckdb.DuckDBPyConnection) -> None:
            for name in names:
                connection.execute(FORGET.format(**_names(target)), [name])
            _drop_if_empty(connection, _names(target))

        await _change(target, discard)


@dataclass(frozen=True, slots=True)
class _PartRows:
    """The rows of a part as Arrow data, with the columns that name the iteration.

    Attributes:
        added: names of those columns that the rows themselves do not have.
    """

    rows: pa.Table | dataset.Dataset
    added: frozenset[str]

    def view(self, without: frozenset[str]) -> str:
        """Returns the statement that creates a view of the rows."""
        return ROWS.format(without=f"EXCLUDE ({listed(sorted(without))})" if without else "")


async def _arrow_part(result: Any, own: Mapping[str, Any], path: Path) -> _PartRows:
    """Returns the rows as Arrow data; those of a stored result in a file at the path."""
    names: set[str] = set()

    async def named() -> AsyncIterator[list[dict[str, Any]]]:
        async for rows in batches_of(result):
            names.update(name for row in rows for name in row)
            yield [{**row, **own, **row} for row in rows]

    rows: pa.Table | dataset.Dataset
    if isinstance(result, StoredResult):
        schema = await arrow_schema(named())
        schema = pa.schema([field for field in schema if field.name not in _taken(own, names)])
        with pa.ipc.new_file(path, schema) as file:
            async for some in named():
                file.write_table(await asyncio.to_thread(arrow_rows, some, schema))
        rows = dataset.dataset(path, format="ipc")
    else:
        [together] = [rows async for rows in named()]
        rows = await asyncio.to_thread(arrow_rows, together)
        rows = rows.drop_columns(list(_taken(own, names)))
    return _PartRows(rows, frozenset(own) - names - _taken(own, names))


def _taken(own: Mapping[str, Any], names: set[str]) -> set[str]:
    """Returns the iteration's columns that the rows have in another case, which DuckDB does not distinguish."""
    folded = {name.casefold() for name in names}
    return {name for name in own if name not in names and name.casefold() in folded}


def _stage(connection: duckdb.DuckDBPyConnection, place: PartPlace, given: _PartRows) -> None:
    if _is_published(connection, place):
        return
    names = _names(place)
    connection.register("noetl_given", given.rows)
    connection.execute(given.view(given.added))
    connection.execute(CREATE_TABLE.format(**names))
    columns = {name for (name,) in connection.execute(COLUMNS.format(**names)).fetchall()}
    connection.execute(given.view(given.added - columns))
    _refuse_changed_values(connection, names)
    connection.execute(CREATE_STAGED.format(**names))
    connection.execute(FORGET.format(**names), [place.part])
    connection.execute(STAGE.format(**names), [place.part])


def _names(place: PartPlace) -> dict[str, str]:
    return {"table": sql_identifier(place.table), "staged": f'noetl."{_staged_name(place)}"'}


def _staged_name(place: PartPlace) -> str:
    return "staged_" + place.table.replace('"', "'")


def _has_staged(connection: duckdb.DuckDBPyConnection, place: PartPlace) -> bool:
    return bool(_value(connection, HAS_TABLE, [_staged_name(place)]))


def _is_published(connection: duckdb.DuckDBPyConnection, place: PartPlace) -> bool:
    return bool(_value(connection, IS_PUBLISHED, [place.table, place.part]))


def _refuse_changed_values(connection: duckdb.DuckDBPyConnection, names: dict[str, str]) -> None:
    """Refuses rows whose values a column's type would change: DuckDB rounds 2.5 to fit an integer.

    Tables with decimals or floats define their own precision.
    """
    given = {name: (column, type) for name, column, type in _types(connection, "noetl_rows")}
    for name, _, type in _types(connection, names["table"]):
        column, own = given.get(name, ("", type))
        if type == own or type == "FLOAT" or type.startswith("DECIMAL"):
            continue
        query = CHANGED.format(column=sql_identifier(column), type=type, compared=_compared(own, type))
        changed = connection.execute(query).fetchone()
        if changed is not None:
            raise ToolError(
                f"sink: table {names['table']}: column {column} is {type} and would change {own} "
                f"{changed[0][:50]!r}; create the table with the type that all rows have, or convert in 'args'",
                kind="schema",
            )


def _compared(own: str, type: str) -> str:
    """Returns the type in which a value is compared with its value in the column; text by its content."""
    if own != "VARCHAR":
        return own
    if type.endswith(("INT", "INTEGER")):
        return "DECIMAL(38, 9)"
    return "TIMESTAMP" if type == "DATE" else type


def _types(connection: duckdb.DuckDBPyConnection, table: str) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = connection.execute(TYPES.format(table=table)).fetchall()
    return found


def _drop_if_empty(connection: duckdb.DuckDBPyConnection, names: dict[str, str]) -> None:
    """Drops an empty staging table, so that a table that is altered later is staged with its new columns."""
    if not _value(connection, COUNT.format(**names), []):
        connection.execute(DROP.format(**names))


def _delete_replaced(connection: duckdb.DuckDBPyConnection, place: PartPlace, names: dict[str, str]) -> None:
    """Deletes the rows that a part replaces: those of its key, of its iteration, or all."""
    if place.mode is WriteMode.APPEND:
        return
    columns = {name for (name,) in connection.execute(COLUMNS.format(**names)).fetchall()}
    key = (
        place.key if place.mode is WriteMode.UPSERT else tuple(name for name in place.own if name in columns)
    )
    if not key:
        connection.execute(EMPTY.format(**names))
        return
    same = " AND ".join(f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in map(sql_identifier, key))
    connection.execute(REPLACED.format(**names, same=same), [place.part])


def _value(connection: duckdb.DuckDBPyConnection, query: str, values: list[Any]) -> Any:
    [(value,)] = connection.execute(query, values).fetchall()
    return value


async def _change(place: PartPlace, work: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    """Makes one change in a transaction on the database of a part.

    Raises:
        ToolError: DuckDB refused it, or another process has the file open for too long; nothing was changed.
    """
    loop = asyncio.get_running_loop()
    queue = _queues.setdefault(loop, defaultdict(_Queue))[place.path]
    change = _Change(work, loop.create_future())
    queue.waiting.append(change)
    making = asyncio.create_task(_make_changes(place.path, queue))
    _running.add(making)  # the loop itself holds tasks weakly
    making.add_done_callback(_running.discard)
    try:
        return cast(T, await change.done)
    except duckdb.Error as error:
        held = _is_held(error)
        remedy = "; another process holds the file: end it, or give each a file of its own" if held else ""
        raise ToolError(
            f"sink: table {place.table} of {place.path}: {error}{remedy}",
            kind="db_connection" if held else kind_of_duckdb(error),
            code=type(error).__name__,
            retryable=held,
        ) from None


async def _make_changes(path: str, queue: _Queue) -> None:
    """Makes every change that waits for the file, which is opened and closed once for all of them."""
    async with queue.lock:
        changes = [change for change in queue.waiting if not change.done.cancelled()]
        queue.waiting.clear()
        if not changes:
            return
        try:
            ends = await asyncio.to_thread(_transact_all, path, [change.work for change in changes])
        except Exception as error:
            ends = [error] * len(changes)
        for change, end in zip(changes, ends, strict=True):
            if change.done.cancelled():
                continue
            if isinstance(end, Exception):
                change.done.set_exception(end)
            else:
                change.done.set_result(end)


def _transact_all(path: str, works: Sequence[Callable[[duckdb.DuckDBPyConnection], Any]]) -> list[Any]:
    """Returns the result of each change, or the exception that rolled its transaction back."""
    ends: list[Any] = []
    with _opened(path) as connection:
        connection.execute(BOOKKEEPING)
        for work in works:
            try:
                ends.append(_transact(connection, work))
            except Exception as error:
                ends.append(error)
    return ends


def _transact(connection: duckdb.DuckDBPyConnection, work: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    connection.begin()
    try:
        result = work(connection)
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return result


def _opened(path: str) -> duckdb.DuckDBPyConnection:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return duckdb.connect(path)
        except duckdb.Error as error:
            if not _is_held(error) or time.monotonic() > until:
                raise
            time.sleep(PAUSE_SECONDS)


def _is_held(error: duckdb.Error) -> bool:
    return isinstance(error, duckdb.IOException) and "lock" in str(error).lower()
