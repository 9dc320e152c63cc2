"""The transfer tool: opens the source, and writes to the target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import duckdb
import obstore

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, as_result_ref
from noetl_dagster.tools.rows.arrow import Row
from noetl_dagster.tools.sql.duckdb import is_held, kind_of_duckdb, own_error
from noetl_dagster.tools.sql.views import mount_object_storage
from noetl_dagster.tools.transfer.chunks import Transfer, TransferChunk, TransferOutcome, TransferSource
from noetl_dagster.tools.transfer.databases import DatabaseSource, database_of, open_database, write_database
from noetl_dagster.tools.transfer.duckdb import DuckdbSource, write_duckdb
from noetl_dagster.tools.transfer.files import FileSource, FolderSource, write_file
from noetl_dagster.tools.transfer.folders import write_folder
from noetl_dagster.tools.transfer.http import HttpSource, write_http
from noetl_dagster.tools.transfer.options import EndKind, TransferEnd, Verify, read_end, read_options
from noetl_dagster.tools.transfer.postgres_source import open_postgres
from noetl_dagster.tools.transfer.postgres_target import write_postgres


class TransferTool(Tool):
    """Copies rows.

    Input: ``source`` and ``target``, each ``{kind, auth, ...}`` with kind postgres, mysql, sqlite, duckdb,
    object (s3, gcs or a file), http; a source may also be a result (``ref``); fields as in
    :class:`~noetl_dagster.tools.transfer.options.TransferEnd`. ``mode``: append (the default for tables), replace
    (the default for objects) or upsert by ``key``. ``chunk_size`` rows (10,000) are in memory at a time; only an http
    response and a JSON file are held as a whole. ``verify``: rows (the default), checksum or none; ``on_drift``: error
    (the default), ignore or add; ``resumable``: true, false or auto (the default).

    Output: ``{rows, chunks, mode, source, target, checksum, verified}``: ``source`` and ``target`` are the kinds,
    ``verified`` is ``{by, read, written}``; also the ``added`` and ``ignored`` columns if there are any, and the number
    of rows of an earlier process at which the transfer ``resumed``.

    Raises ``ToolError``; a table is then unchanged.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Copies the rows."""
        source = read_end(call.config.get("source"), "source", call, context.settings)
        target = read_end(call.config.get("target"), "target", call, context.settings)
        if "key" in call.config and not target.key:
            key = call.config["key"]
            target = target.model_copy(update={"key": (key,) if isinstance(key, str) else tuple(key)})
        options = read_options(call, target)
        checked = options.verify is Verify.CHECKSUM
        try:
            async with _open_source(
                source, call, context, options.size, tables=target.takes_tables, snapshot=checked
            ) as opened:
                transfer = Transfer(opened, target, options, call, context)
                outcome = await _write(transfer)
        except (duckdb.Error, obstore.exceptions.BaseError, StorageError, OSError, ValueError) as error:
            cause = own_error(error)
            kind = "parse" if isinstance(cause, ValueError) else kind_of_duckdb(cause)
            text, held = f"{type(cause).__name__}: {cause}", is_held(cause)
            raise call.error(text, "db_connection" if held else kind, retryable=held) from None
        verified: dict[str, Any] = {"by": options.verify.value}
        if options.verify is not Verify.NONE:
            verified |= {"read": outcome.rows, "written": outcome.written, **outcome.verified}
        data = {
            "rows": outcome.rows,
            "chunks": transfer.chunk_count or -(-outcome.rows // options.size),
            "mode": options.mode.value,
            "source": source.kind.value,
            "target": target.kind.value,
            "checksum": outcome.checksum,
            "verified": verified,
            **outcome.drift,
        }
        return ToolResult(data=data if outcome.resumed is None else {**data, "resumed": outcome.resumed})


@asynccontextmanager
async def _open_source(
    end: TransferEnd, call: ToolCall, context: ToolContext, size: int, *, tables: bool, snapshot: bool
) -> AsyncIterator[TransferSource]:
    """Opens a source, which yields chunks of at most ``size`` rows: Arrow tables if the target takes these.

    ``snapshot``: it is read more than once.
    """
    match end.kind:
        case EndKind.POSTGRES:
            async with open_postgres(end, call, context, size, tables=tables, snapshot=snapshot) as postgres:
                yield postgres
        case EndKind.DUCKDB:
            path = ":memory:" if end.database is None else str(Path(call.folder, end.database))
            connection = await asyncio.to_thread(duckdb.connect, path)
            try:
                mount_object_storage(connection, context.settings)
                yield DuckdbSource(connection, end, size, path)
            finally:
                await asyncio.to_thread(connection.close)
        case EndKind.SQLITE | EndKind.MYSQL | EndKind.SNOWFLAKE | EndKind.BIGQUERY:
            async with open_database(end, await database_of(end, call, context), call) as session:
                yield DatabaseSource(session, end, size, tables=tables)
        case EndKind.OBJECT:
            yield await (FolderSource if end.is_folder else FileSource).of(end, call, context, size)
        case EndKind.HTTP:
            yield HttpSource(end, call, context, size)
        case EndKind.RESULT:
            yield ResultSource(end, context, size)


async def _write(transfer: Transfer) -> TransferOutcome:
    """Writes all rows. Tables change all at once or not at all."""
    match transfer.target.kind:
        case EndKind.POSTGRES:
            return await write_postgres(transfer)
        case EndKind.DUCKDB:
            return await write_duckdb(transfer)
        case EndKind.SQLITE | EndKind.MYSQL:
            return await write_database(transfer)
        case EndKind.OBJECT if transfer.target.is_folder:
            return await write_folder(transfer)
        case EndKind.OBJECT:
            return await write_file(transfer)
        case _:  # the options refuse kinds that are sources only
            return await write_http(transfer)


class ResultSource(TransferSource):
    """The items of a stored result, always in the same order."""

    def __init__(self, end: TransferEnd, context: ToolContext, size: int) -> None:
        self._ref, self._tool_context, self._size = end.ref, context, size
        self.identity = str(end.ref)

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the items after the first ``after`` ones."""
        reference = as_result_ref(self._ref)
        if reference is None:
            raise ToolError("transfer: source.ref is no reference of a result", kind="schema")
        rows: list[Row] = []
        count = 0
        async for item in self._tool_context.results.items(reference):
            count += 1
            if count > (after or 0):
                rows.append(item if isinstance(item, dict) else {"value": item})
            if len(rows) >= self._size:
                yield TransferChunk(rows, count)
                rows = []
        if rows:
            yield TransferChunk(rows, count)
