"""Parts as rows of a DuckDB table: staged in a schema of their own, moved into the table in one transaction.

Only one process can have a DuckDB file open for writing. The file is opened for the changes that wait and closed
again; while another process has it open, changes wait.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa
from pyarrow import dataset

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.rows.arrow import arrow_schema, arrow_table
from noetl_dagster.tools.rows.batches import StoredResult, batches_of
from noetl_dagster.tools.sinks.place import PartPlace
from noetl_dagster.tools.sql.duckdb import is_held, kind_of_duckdb, open_file
from noetl_dagster.tools.sql.tables import Drift, WriteMode, drift_of_sink, listed, quoted

T = TypeVar("T")

PUBLISHED = "SELECT part FROM noetl.sink_part WHERE target = ? AND part IN (SELECT unnest(?::VARCHAR[]))"
NOTE_PUBLISHED = "INSERT INTO noetl.sink_part (target, part) VALUES (?, ?) ON CONFLICT DO NOTHING"
HAS_TABLE = """
SELECT count(*) FROM duckdb_tables()
WHERE schema_name = 'noetl' AND table_name = ? AND database_name = current_database()
"""

# {table} is the playbook's table, {staged} the one of its parts; both are quoted
ROWS = "CREATE OR REPLACE TEMP VIEW noetl_rows AS SELECT * {without} FROM noetl_given"
CREATE_TABLE = "CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM noetl_rows LIMIT 0"
CREATE_STAGED = "CREATE TABLE IF NOT EXISTS {staged} AS SELECT ''::VARCHAR AS noetl_part, * FROM {table} LIMIT 0"
TYPES = "SELECT lower(column_name), column_name, column_type FROM (DESCRIBE {of})"
CHANGED = """
SELECT {column}::VARCHAR FROM noetl_rows
WHERE TRY_CAST(TRY_CAST({column} AS {type}) AS {compared}) IS DISTINCT FROM TRY_CAST({column} AS {compared}) LIMIT 1
"""
FORGET = "DELETE FROM {staged} WHERE noetl_part = ?"
STAGE = "INSERT INTO {staged} BY NAME SELECT ? AS noetl_part, * FROM noetl_rows"
MOVE = "INSERT INTO {table} BY NAME SELECT {columns} FROM {staged} WHERE noetl_part = ?"
ADD_COLUMN = "ALTER TABLE {to} ADD COLUMN IF NOT EXISTS {column} {kind}"
COUNT_VALUES = "SELECT {counts} FROM {staged} WHERE noetl_part = ?"
EMPTY = "DELETE FROM {table}"
REPLACED = "DELETE FROM {table} AS old USING {staged} AS new WHERE noetl_part = ? AND {same}"
COUNT = "SELECT count(*) FROM {staged}"
DROP = "DROP TABLE {staged}"
PARTS = "SELECT DISTINCT noetl_part FROM {staged} WHERE starts_with(noetl_part, ?)"


class DuckdbParts:
    """A :class:`~noetl_dagster.tools.sinks.place.PartTarget` in a DuckDB file."""

    async def stage(self, place: PartPlace, result: Any) -> None:
        """Stages the rows in a table of the schema ``noetl``."""
        with tempfile.TemporaryDirectory(prefix="noetl-sink-") as folder:
            rows, added = await _arrow_part(result, place.own, Path(folder, "rows.arrow"))
            await _change(place, lambda staging: staging.stage(place, rows, added))

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """Moves parts into the table; a part that was published before is left as it is."""
        await _change(target, lambda staging: staging.publish(parts))

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Returns the names of staged parts with a prefix."""
        return await _change(target, lambda staging: staging.parts(prefix))

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Returns the names of parts that are not recorded as published."""
        names = [place.part for place in parts]
        published = await _change(target, lambda staging: staging.published(names)) if names else set()
        return [name for name in names if name not in published]

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        """Deletes staged parts."""
        await _change(target, lambda staging: staging.forget(names))


async def _arrow_part(
    result: Any, own: Mapping[str, Any], path: Path
) -> tuple[pa.Table | dataset.Dataset, frozenset[str]]:
    """Returns the rows as Arrow data, with the columns that name the iteration, and which of these were added.

    Args:
        path: of the file for the rows of a stored result.
    """
    names: set[str] = set()

    async def named() -> AsyncIterator[list[dict[str, Any]]]:
        async for rows in batches_of(result):
            names.update(name for row in rows for name in row)
            yield [{**row, **own, **row} for row in rows]

    def taken() -> set[str]:
        """Returns the iteration's columns that rows have in another case, which DuckDB does not distinguish."""
        folded = {name.casefold() for name in names}
        return {name for name in own if name not in names and name.casefold() in folded}

    rows: pa.Table | dataset.Dataset
    if isinstance(result, StoredResult):
        schema = await arrow_schema(named())
        schema = pa.schema([field for field in schema if field.name not in taken()])
        with pa.ipc.new_file(path, schema) as file:
            async for some in named():
                file.write_table(await asyncio.to_thread(arrow_table, some, schema))
        rows = dataset.dataset(path, format="ipc")
    else:
        [together] = [rows async for rows in named()]
        rows = (await asyncio.to_thread(arrow_table, together)).drop_columns(list(taken()))
    return rows, frozenset(own) - names - taken()


class _Staging:
    """The table of a place and the staging of its parts, in one transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, place: PartPlace) -> None:
        self._connection, self._target = connection, place.table
        self._staged = "staged_" + place.table.replace('"', "'")
        self._names = {"table": sql_identifier(place.table), "staged": f'noetl."{self._staged}"'}

    def stage(self, place: PartPlace, rows: pa.Table | dataset.Dataset, added: frozenset[str]) -> None:
        if self.published([place.part]):
            return
        self._connection.register("noetl_given", rows)
        self._view(added)
        self._run(CREATE_TABLE)
        without = added - self._columns()
        self._view(without)
        self._run(CREATE_STAGED)
        arriving, table = self._types("noetl_rows"), self._types(self._names["table"])
        drift = self._drift(place, table)
        drift.sort(list(arriving), str)
        if drift.ignored:
            self._view(without | {arriving.pop(name)[0] for name in drift.ignored})
        staged = self._types(self._names["staged"])
        for name in [name for name in arriving if name not in staged]:
            self._add_column("staged", *table.get(name, arriving[name]))
        for target in ("table", "staged"):
            self._refuse_changed_values(self._names[target])
        self._run(FORGET, place.part)
        self._run(STAGE, place.part)

    def publish(self, parts: Collection[PartPlace]) -> None:
        if not self._has_staged():
            return
        for place in parts:
            if not self.published([place.part]):
                self._delete_replaced(place)
                self._run(MOVE, place.part, columns=listed(self._columns_to_move(place)))
                self._run(NOTE_PUBLISHED, place.table, place.part)
            self._run(FORGET, place.part)
        self._drop_if_empty()

    def parts(self, prefix: str) -> set[str]:
        return {name for (name,) in self._run(PARTS, prefix)} if self._has_staged() else set()

    def published(self, parts: Sequence[str]) -> set[str]:
        return {name for (name,) in self._run(PUBLISHED, self._target, parts)}

    def forget(self, parts: Collection[str]) -> None:
        for part in parts:
            self._run(FORGET, part)
        self._drop_if_empty()

    def _drop_if_empty(self) -> None:
        """Drops an empty staging table, so that a table that is altered later is staged with its new columns."""
        [(count,)] = self._run(COUNT)
        if not count:
            self._run(DROP)

    def _run(self, query: str, *values: Any, **words: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.execute(
            query.format(**self._names, **words), list(values)
        ).fetchall()
        return rows

    def _view(self, without: frozenset[str]) -> None:
        self._run(ROWS, without=f"EXCLUDE ({listed(sorted(without))})" if without else "")

    def _columns(self) -> set[str]:
        return set(self._types(self._names["table"]))

    def _types(self, of: str) -> dict[str, tuple[str, str]]:
        """Returns the columns of a table or view with their types, by their names in small letters."""
        return {name: (column, kind) for name, column, kind in self._run(TYPES, of=of)}

    def _drift(self, place: PartPlace, columns: Iterable[str]) -> Drift:
        return drift_of_sink(place.on_new_column, f"sink: table {place.table} of {place.path}", columns)

    def _add_column(self, to: str, column: str, kind: str) -> None:
        self._run(ADD_COLUMN, to=self._names[to], column=quoted(column), kind=kind)

    def _columns_to_move(self, place: PartPlace) -> list[str]:
        """Returns the columns of a part, and adds those with values that the table lacks."""
        table, staged = self._types(self._names["table"]), self._types(self._names["staged"])
        del staged["noetl_part"]
        has_value = {name: f"count({quoted(staged[name][0])})" for name in staged if name not in table}
        if has_value:
            [counts] = self._run(COUNT_VALUES, place.part, counts=", ".join(has_value.values()))
            lacking = [name for name, count in zip(has_value, counts, strict=True) if count]
            _, new = self._drift(place, table).sort(lacking, str)
            for name in new:
                self._add_column("table", *staged[name])
                table[name] = staged[name]
        return [column for name, (column, _) in staged.items() if name in table]

    def _has_staged(self) -> bool:
        [(count,)] = self._run(HAS_TABLE, self._staged)
        return bool(count)

    def _refuse_changed_values(self, table: str) -> None:
        """Refuses rows whose values a column's type would change: DuckDB rounds 2.5 to fit an integer.

        Tables with decimals or floats define their own precision for doubles and text.
        """
        arriving = self._types("noetl_rows")
        for name, (_, kind) in self._types(table).items():
            column, own = arriving.get(name, ("", kind))
            if kind in (own, "FLOAT") or (kind.startswith("DECIMAL") and not own.startswith("DECIMAL")):
                continue
            compared = own
            if own == "VARCHAR":  # text by its content
                is_whole = kind.endswith(("INT", "INTEGER"))
                compared = "DECIMAL(38, 9)" if is_whole else "TIMESTAMP" if kind == "DATE" else kind
            changed = self._run(CHANGED, column=sql_identifier(column), type=kind, compared=compared)
            if changed:
                raise ToolError(
                    f"sink: table {self._names['table']}: column {column} is {kind} and would change {own} "
                    f"{changed[0][0][:50]!r}; create the table with the type that all rows have, or convert in 'args'",
                    kind="schema",
                )

    def _delete_replaced(self, place: PartPlace) -> None:
        """Deletes the rows that a part replaces: those of its key, of its iteration, or all."""
        if place.mode is WriteMode.APPEND:
            return
        key: Collection[str] = place.key
        if place.mode is WriteMode.REPLACE:
            columns = self._columns()
            key = [name for name in place.own if name in columns]
        if key:
            same = (f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in map(sql_identifier, key))
            self._run(REPLACED, place.part, same=" AND ".join(same))
        else:
            self._run(EMPTY)


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


async def _change(place: PartPlace, work: Callable[[_Staging], T]) -> T:
    """Makes one change in a transaction on a part's database; raises ``ToolError`` if nothing was changed."""
    loop = asyncio.get_running_loop()
    queue = _queues.setdefault(loop, defaultdict(_Queue))[place.path]
    change = _Change(lambda connection: work(_Staging(connection, place)), loop.create_future())
    queue.waiting.append(change)
    making = asyncio.create_task(_make_changes(place.path, queue))
    _running.add(making)  # the loop itself holds tasks weakly
    making.add_done_callback(_running.discard)
    try:
        return cast(T, await change.done)
    except duckdb.Error as error:
        held = is_held(error)
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
    with open_file(path) as connection:
        for work in works:
            try:
                connection.begin()
                end = work(connection)
                connection.commit()
            except Exception as error:
                with suppress(duckdb.Error):  # DuckDB has rolled a failed commit back
                    connection.rollback()
                end = error
            ends.append(end)
    return ends
