"""Where a transfer reads: opens the source of each kind of place; DuckDB and results by reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_identifier
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.references import as_result_ref
from noetl_dagster.tools.rows.files import Row
from noetl_dagster.tools.sql.percent import without_percent
from noetl_dagster.tools.sql.statements import BoundStatement, bind
from noetl_dagster.tools.sql.tables import listed
from noetl_dagster.tools.sql.views import mount_object_storage
from noetl_dagster.tools.transfer.chunks import Chunk, Source, threaded
from noetl_dagster.tools.transfer.places import Place, PlaceKind
from noetl_dagster.tools.transfer.sources.files import FileSource
from noetl_dagster.tools.transfer.sources.folders import FolderSource
from noetl_dagster.tools.transfer.sources.pages import HttpSource
from noetl_dagster.tools.transfer.sources.postgres import open_postgres


@asynccontextmanager
async def open_source(
    place: Place, call: ToolCall, box: Toolbox, size: int, *, tables: bool, snapshot: bool
) -> AsyncIterator[Source]:
    """The source that a place describes, in chunks of at most ``size`` rows.

    Args:
        tables: the target takes Arrow tables.
        snapshot: the source is read more than once.
    """
    match place.kind:
        case PlaceKind.POSTGRES:
            async with open_postgres(
                place, statement_of(place), call, box, size, tables=tables, snapshot=snapshot
            ) as postgres:
                yield postgres
        case PlaceKind.DUCKDB:
            path = ":memory:" if place.database is None else str(Path(call.folder, place.database))
            connection = await asyncio.to_thread(duckdb.connect, path)
            try:
                mount_object_storage(connection, box.settings)
                yield DuckdbSource(connection, place, size, path)
            finally:
                await asyncio.to_thread(connection.close)
        case PlaceKind.OBJECT:
            yield await (FolderSource if place.is_folder else FileSource).of(place, call, box, size)
        case PlaceKind.HTTP:
            yield HttpSource(place, call, box, size)
        case PlaceKind.RESULT:
            yield ResultSource(place, box, size)


async def parquet_schema(folder: Place, name: str, call: ToolCall, box: Toolbox) -> pa.Schema:
    """The schema of a file in a folder."""
    file = await FileSource.of(folder.model_copy(update={"path": folder.path + name}), call, box, 1)
    return await asyncio.to_thread(file.schema)


def statement_of(place: Place) -> BoundStatement:
    """What a table or query is read with."""
    query = place.query or f"SELECT * FROM {sql_identifier(place.table)}"
    return bind(without_percent([query], place.params)[0], place.params)


class DuckdbSource:
    """A table, whose rows keep their order, or a query; one with ``order_by`` can be gone on with."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, place: Place, size: int, path: str) -> None:
        self._connection, self._place, self._size = connection, place, size
        self._file = None if path == ":memory:" else Path(path)
        self.seeks = bool(place.order_by or not place.query)
        self.bytes = 0 if self._file is None else self._file.stat().st_size

    async def identity(self) -> str:
        return ""

    async def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        statement = statement_of(self._place)
        text = statement.text
        if self._place.order_by or after:
            order = f" ORDER BY {listed(self._place.order_by)}" if self._place.order_by else ""
            text = f"SELECT * FROM ({text.rstrip().rstrip(';')}\n) AS source{order} OFFSET {int(after or 0)}"
        reader = await asyncio.to_thread(self._read, text, list(statement.values) or None)
        done = int(after or 0)
        async for batch in threaded(reader):
            done += batch.num_rows
            if batch.num_rows:
                yield Chunk(pa.Table.from_batches([batch]), done if self.seeks else None)

    def _read(self, text: str, values: list[Any] | None) -> Any:
        relation = self._connection.sql(text, params=values)
        if relation is None:
            raise ToolError("transfer: the query of the duckdb source gives no rows", kind="schema")
        return relation.to_arrow_reader(self._size)


class ResultSource:
    """The items of a stored result, always in the same order."""

    seeks = True
    bytes = 0

    def __init__(self, place: Place, box: Toolbox, size: int) -> None:
        self._place, self._box, self._size = place, box, size

    async def identity(self) -> str:
        return str(self._place.ref)

    async def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        reference = as_result_ref(self._place.ref)
        if reference is None:
            raise ToolError("transfer: source.ref is no reference of a result", kind="schema")
        rows: list[Row] = []
        count = 0
        async for item in self._box.results.items(reference):
            count += 1
            if count <= (after or 0):
                continue
            rows.append(item if isinstance(item, dict) else {"value": item})
            if len(rows) >= self._size:
                yield Chunk(rows, count)
                rows = []
        if rows:
            yield Chunk(rows, count)
