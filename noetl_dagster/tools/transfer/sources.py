"""Where a transfer reads: PostgreSQL, DuckDB, files and objects, http, results by reference."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import obstore

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_identifier
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.http import HttpTool
from noetl_dagster.tools.references import as_result_ref
from noetl_dagster.tools.rows.files import Row, in_chunks, read_file
from noetl_dagster.tools.rows.formats import row_format
from noetl_dagster.tools.rows.inside import rows_of
from noetl_dagster.tools.sql.cursor import read_rows
from noetl_dagster.tools.sql.percent import without_percent
from noetl_dagster.tools.sql.statements import BoundStatement, bind
from noetl_dagster.tools.sql.views import mount_object_storage
from noetl_dagster.tools.transfer.places import Place, PlaceKind, object_place

Chunks = AsyncIterator[list[Row]]


def read_chunks(place: Place, call: ToolCall, box: Toolbox, size: int) -> Chunks:
    """The rows of a place in chunks of at most ``size``, with the values of their source's own types."""
    match place.kind:
        case PlaceKind.POSTGRES:
            return read_rows(
                _statement(place), replace(call, auth=place.auth), box, size, readonly=not place.query
            )
        case PlaceKind.DUCKDB:
            return _duckdb(place, call, box, size)
        case PlaceKind.OBJECT:
            return _object(place, call, box, size)
        case PlaceKind.HTTP:
            return _http(place, call, box, size)
        case PlaceKind.RESULT:
            return _result(place, box, size)


def _statement(place: Place) -> BoundStatement:
    query = place.query or f"SELECT * FROM {sql_identifier(place.table)}"
    return bind(without_percent([query], place.params)[0], place.params)


async def _duckdb(place: Place, call: ToolCall, box: Toolbox, size: int) -> Chunks:
    path = ":memory:" if place.database is None else str(Path(call.folder, place.database))
    statement = _statement(place)
    connection = await asyncio.to_thread(duckdb.connect, path)
    try:
        mount_object_storage(connection, box.settings)
        cursor = await asyncio.to_thread(connection.execute, statement.text, list(statement.values) or None)
        columns = [column[0] for column in cursor.description or ()]
        while rows := await asyncio.to_thread(cursor.fetchmany, size):
            yield [dict(zip(columns, row, strict=True)) for row in rows]
    finally:
        await asyncio.to_thread(connection.close)


async def _object(place: Place, call: ToolCall, box: Toolbox, size: int) -> Chunks:
    """Streams an object to a local file first: Parquet can be read only from its end."""
    format = row_format(place.format, place.path)
    store, key = await object_place(place, call, box)
    if store is None:
        async for chunk in _threaded(read_file(Path(key), format, size)):
            yield chunk
        return
    with tempfile.TemporaryDirectory(prefix="noetl-transfer-") as folder:
        local = Path(folder, "source")
        file = await asyncio.to_thread(local.open, "wb")
        with file:
            async for part in (await obstore.get_async(store, key)).stream():
                file.write(part)
        async for chunk in _threaded(read_file(local, format, size)):
            yield chunk


async def _http(place: Place, call: ToolCall, box: Toolbox, size: int) -> Chunks:
    """One response, whose rows are cut into chunks; ``rows`` is the dotted path of the list in its body."""
    result = await HttpTool().run(replace(call, config=place.request, auth=place.auth), box)
    body = result.data["data"]
    if isinstance(body, str) and (place.format or "jsonl") != "json":
        with tempfile.TemporaryDirectory(prefix="noetl-transfer-") as folder:
            local = Path(folder, "source")
            await asyncio.to_thread(local.write_text, body)
            async for chunk in _threaded(read_file(local, row_format(place.format or "jsonl", ""), size)):
                yield chunk
        return
    for name in filter(None, place.rows.split(".")):
        if not isinstance(body, dict) or name not in body:
            raise ToolError(f"transfer: the response has no {place.rows!r}", kind="schema")
        body = body[name]
    for chunk in in_chunks(iter(rows_of(body)), size):
        yield chunk


async def _result(place: Place, box: Toolbox, size: int) -> Chunks:
    reference = as_result_ref(place.ref)
    if reference is None:
        raise ToolError("transfer: source.ref is no reference of a result", kind="schema")
    chunk: list[Row] = []
    async for item in box.results.items(reference):
        chunk.append(item if isinstance(item, dict) else {"value": item})
        if len(chunk) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _threaded(chunks: Iterator[list[Any]]) -> Chunks:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
