"""Where a transfer reads: opens the source of each kind of place; DuckDB and results by reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import duckdb
import obstore

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult, as_result_ref
from noetl_dagster.tools.http.tool import HttpTool
from noetl_dagster.tools.rows.files import Row, json_row
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sql.duckdb import kind_of_duckdb
from noetl_dagster.tools.sql.views import mount_object_storage
from noetl_dagster.tools.transfer.chunks import Chunk, Source
from noetl_dagster.tools.transfer.duckdb import DuckdbSource, write_duckdb
from noetl_dagster.tools.transfer.files import FileSource, FolderSource, write_file
from noetl_dagster.tools.transfer.folders import write_parts
from noetl_dagster.tools.transfer.http import HttpSource
from noetl_dagster.tools.transfer.options import (
    Options,
    Place,
    PlaceKind,
    Verify,
    place_format,
    read_options,
    read_place,
    statement_of,
)
from noetl_dagster.tools.transfer.postgres_source import PostgresSource, open_postgres
from noetl_dagster.tools.transfer.postgres_target import Outcome, write_postgres


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


Watch = Callable[[AsyncIterator[Chunk]], AsyncIterator[Chunk]]


async def write_to(
    place: Place, source: Source, options: Options, call: ToolCall, box: Toolbox, watch: Watch
) -> Outcome:
    """Writes all rows to a place. Tables change all at once or not at all.

    Args:
        watch: is given the chunks on their way.
    """
    match place.kind:
        case PlaceKind.POSTGRES:
            return await write_postgres(place, source, options, call, box, watch)
        case PlaceKind.DUCKDB:
            return await write_duckdb(place, watch(source.chunks()), options, call)
        case PlaceKind.OBJECT if place.is_folder:
            return await write_parts(place, source, options, call, box, watch)
        case PlaceKind.OBJECT:
            return await write_file(place, watch(source.chunks()), options, call, box)
        case PlaceKind.HTTP:
            return await _http(place, watch(source.chunks()), call, box)
        case PlaceKind.RESULT:
            raise ToolError("transfer: a result is no target; use the artifact tool", kind="schema")


async def _http(place: Place, chunks: AsyncIterator[Chunk], call: ToolCall, box: Toolbox) -> Outcome:
    """Sends each chunk as a JSON list."""
    tool, count = HttpTool(), 0
    async for chunk in chunks:
        rows = [json_row(row) for row in chunk.as_rows()]
        config: dict[str, Any] = {"method": "POST", **place.request, "json": rows}
        await tool.run(replace(call, config=config, auth=place.auth), box)
        count += len(rows)
    return Outcome(count, count)


class TransferTool(Tool):
    """Copies rows.

    Input: ``source`` and ``target``, each ``{kind, auth, ...}`` with kind postgres, duckdb, object (s3, gcs
    or a file), http; a source may also be a result (``ref``); fields as in
    :class:`~noetl_dagster.tools.transfer.options.Place`. ``mode``: append (the default for tables), replace
    (for objects) or upsert by ``key``. ``chunk_size`` rows (10,000) are in memory at a time; only a response of
    http and a JSON file are held as a whole. ``verify``: rows (the default), checksum or none; ``on_drift``: error (the
    default), ignore or add; ``resumable``: true, false or auto (the default).

    Output: ``{rows, chunks, mode, source, target, checksum, verified}``: ``source`` and ``target`` are the kinds,
    ``verified`` is ``{by, read, written}``; where they are, ``added`` and ``ignored`` columns, and the rows that an
    earlier process had ``resumed`` from.

    Raises ``ToolError``; a table is then as it was before.
    """

    kind = "transfer"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        source = read_place(call.config.get("source"), "source", call)
        target = read_place(call.config.get("target"), "target", call)
        if "key" in call.config and not target.key:
            key = call.config["key"]
            target = target.model_copy(update={"key": (key,) if isinstance(key, str) else tuple(key)})
        options = read_options(call, target)
        progress = _Progress(call, box)
        try:
            async with open_source(
                source,
                call,
                box,
                options.size,
                tables=_takes_tables(target),
                snapshot=options.verify is Verify.CHECKSUM,
            ) as opened:
                if options.verify is Verify.CHECKSUM and isinstance(opened, PostgresSource):
                    await _refuse_inexact(opened, target, call)
                outcome = await write_to(target, opened, options, call, box, progress.over)
        except (duckdb.Error, obstore.exceptions.BaseError, StorageError, OSError, ValueError) as error:
            text = f"transfer in step {call.step}: {type(error).__name__}: {error}"
            kind = "parse" if isinstance(error, ValueError) else kind_of_duckdb(error)
            raise ToolError(box.credentials.redact(text), kind=kind) from None
        return ToolResult(data=_data(outcome, progress.chunks, options, source, target))


async def _refuse_inexact(source: PostgresSource, target: Place, call: ToolCall) -> None:
    if _takes_tables(target) and (columns := await source.inexact()):
        raise ToolError(
            f"transfer in step {call.step}: numbers of column {', '.join(columns)} have more digits than a double, as "
            "which the target would have them. Read them as text or double precision with source.query, or write "
            "verify: rows",
            kind="schema",
        )


def _takes_tables(target: Place) -> bool:
    if target.kind is PlaceKind.OBJECT:
        return place_format(target) is RowFormat.PARQUET
    return target.kind is PlaceKind.DUCKDB


def _data(outcome: Outcome, chunks: int, options: Options, source: Place, target: Place) -> dict[str, Any]:
    verified: dict[str, Any] = {"by": options.verify.value}
    if options.verify is not Verify.NONE:
        verified |= {"read": outcome.rows, "written": outcome.written, **outcome.verified}
    data = {
        "rows": outcome.rows,
        "chunks": chunks or -(-outcome.rows // options.size),
        "mode": options.mode.value,
        "source": source.kind.value,
        "target": target.kind.value,
        "checksum": outcome.checksum,
        "verified": verified,
        **outcome.drift,
    }
    return data if outcome.resumed is None else {**data, "resumed": outcome.resumed}


class _Progress:
    """Counts chunks on their way and tells the worker, so that a long transfer keeps its claim.

    Attributes:
        chunks: of rows; bytes of COPY have none.
    """

    def __init__(self, call: ToolCall, box: Toolbox) -> None:
        self._call = call
        self._box = box
        self._rows = self._bytes = self.chunks = 0

    async def over(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async with aclosing(cast(Any, chunks)) as stream:
            async for chunk in stream:
                yield chunk
                self._count(chunk)

    def _count(self, chunk: Chunk) -> None:
        if isinstance(chunk.data, bytes):
            self._bytes += len(chunk.data)
            self._box.progress(self._call, f"{self._bytes >> 20} MB transferred")
            return
        self.chunks += 1
        self._rows += chunk.rows
        self._box.progress(self._call, f"{self._rows} rows transferred")
