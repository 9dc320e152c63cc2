"""Where a transfer writes beside PostgreSQL: DuckDB, files and objects, http."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_identifier
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.http import HttpTool
from noetl_dagster.tools.rows.files import RowWriter, json_row, row_writer
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.chunks import Chunk, Source, ahead
from noetl_dagster.tools.transfer.drift import Drift, duckdb_type
from noetl_dagster.tools.transfer.options import Options, Verify
from noetl_dagster.tools.transfer.places import Place, PlaceKind, object_place
from noetl_dagster.tools.transfer.postgres import Outcome, write_postgres

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
            return await _duckdb(place, watch(source.chunks()), options, call)
        case PlaceKind.OBJECT:
            return await _object(place, watch(source.chunks()), options, call, box)
        case PlaceKind.HTTP:
            return await _http(place, watch(source.chunks()), call, box)
        case PlaceKind.RESULT:
            raise ToolError("transfer: a result is no target; use the artifact tool", kind="schema")


async def _duckdb(place: Place, chunks: AsyncIterator[Chunk], options: Options, call: ToolCall) -> Outcome:
    """Makes the table when it is missing, from the first chunk."""
    if place.database is None:
        raise ToolError("transfer: a duckdb target needs 'database', a file", kind="schema")
    if options.mode is WriteMode.UPSERT and not place.key:
        raise ToolError("transfer: upsert into duckdb needs 'key': its unique columns", kind="schema")
    connection = await asyncio.to_thread(duckdb.connect, str(Path(call.folder, place.database)))
    table: _DuckdbTable | None = None
    read = written = 0
    try:
        await asyncio.to_thread(connection.execute, "BEGIN")
        async for chunk in chunks:
            if table is None:
                table = await asyncio.to_thread(_DuckdbTable, connection, place, options, chunk)
            written += await asyncio.to_thread(table.insert, chunk)
            read += chunk.rows
        if options.verify is not Verify.NONE and read != written:
            raise ToolError(f"{read} rows were read, and duckdb took {written}", kind="db")
        await asyncio.to_thread(connection.execute, "COMMIT")
    finally:
        await asyncio.to_thread(connection.close)
    return Outcome(read, written, drift={} if table is None else table.drift.report())


class _DuckdbTable:
    """A table of a file, which takes chunks."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, place: Place, options: Options, first: Chunk
    ) -> None:
        self._connection = connection
        self._table, self._key = sql_identifier(place.table), place.key
        connection.register("noetl_chunk", first.as_table())
        connection.execute(f"CREATE TABLE IF NOT EXISTS {self._table} AS SELECT * FROM noetl_chunk LIMIT 0")
        connection.unregister("noetl_chunk")
        if options.mode is WriteMode.REPLACE:
            connection.execute(f"DELETE FROM {self._table}")
        columns = [row[0] for row in connection.execute(f"DESCRIBE {self._table}").fetchall()]
        self.drift = Drift(options.on_drift, f"duckdb table {self._table}", columns)

    def insert(self, chunk: Chunk) -> int:
        """Takes a chunk, and says how many rows that were."""
        columns, new = self.drift.sort(chunk.columns, lambda name: duckdb_type(chunk, name))
        for name, type_name in new.items():
            self._connection.execute(
                f"ALTER TABLE {self._table} ADD COLUMN {sql_identifier(name)} {type_name}"
            )
        self._connection.register("noetl_chunk", chunk.only(columns).as_table())
        if self._key:
            names = map(sql_identifier, self._key)
            same = " AND ".join(f"{self._table}.{name} = noetl_chunk.{name}" for name in names)
            self._connection.execute(f"DELETE FROM {self._table} USING noetl_chunk WHERE {same}")
        inserted = self._connection.execute(f"INSERT INTO {self._table} BY NAME SELECT * FROM noetl_chunk")
        [count] = inserted.fetchone() or (0,)
        self._connection.unregister("noetl_chunk")
        return int(count)


async def _object(
    place: Place, chunks: AsyncIterator[Chunk], options: Options, call: ToolCall, box: Toolbox
) -> Outcome:
    """Writes a local file, then moves or uploads it as a whole: readers never see half of it."""
    if options.mode is not WriteMode.REPLACE:
        raise ToolError("transfer: an object can only be replaced; write mode: replace", kind="schema")
    format = row_format(place.format, place.path)
    store, key = await object_place(place, call, box)
    local = await asyncio.to_thread(_new_file, None if store is not None else Path(key).parent)
    count, drift = 0, None
    try:
        writer: _ParquetTables | _Rows = (
            _ParquetTables(local) if format is RowFormat.PARQUET else _Rows(local, format)
        )
        with contextlib.closing(writer):
            async for chunk in ahead(chunks):
                if drift is None:
                    drift = Drift(options.on_drift, f"the file {place.path}", chunk.columns)
                columns, _ = drift.sort(chunk.columns, str)
                await asyncio.to_thread(writer.write, chunk.only(columns))
                count += chunk.rows
        outcome = await asyncio.to_thread(_described, local, format, count, options.verify)
        if store is None:
            await asyncio.to_thread(local.replace, key)
        else:
            await obstore.put_async(store, key, local)
            if options.verify is not Verify.NONE:
                size = (await obstore.head_async(store, key))["size"]
                _equal("bytes", outcome.verified["bytes"], size, place)
    finally:
        await asyncio.to_thread(local.unlink, missing_ok=True)
    outcome.drift = {} if drift is None else drift.report()
    return outcome


def _described(path: Path, format: RowFormat, count: int, verify: Verify) -> Outcome:
    """What a file holds, by its own account where it has one."""
    outcome = Outcome(count, count)
    if verify is Verify.NONE:
        return outcome
    if format is RowFormat.PARQUET:
        outcome.written = pq.read_metadata(path).num_rows
        _equal("rows", count, outcome.written, path)
    with path.open("rb") as file:
        outcome.checksum = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    outcome.verified["bytes"] = path.stat().st_size
    return outcome


def _equal(what: str, given: int, found: int, where: Any) -> None:
    if given != found:
        raise ToolError(
            f"transfer: {given} {what} were written to {where}, which has {found}", kind="storage"
        )


class _Rows:
    """Chunks as text of a format."""

    def __init__(self, path: Path, format: RowFormat) -> None:
        self._writer: RowWriter = row_writer(path, format)

    def write(self, chunk: Chunk) -> None:
        self._writer.write(chunk.as_rows())

    def close(self) -> None:
        self._writer.close()


class _ParquetTables:
    """Parquet with the schema of the first chunk; columns that are null there become text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def write(self, chunk: Chunk) -> None:
        try:
            table = chunk.as_table(self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ToolError(
                f"rows of different types in one column: {error}; convert the column in the source",
                kind="schema",
            ) from None
        if self._writer is None:
            fields = [
                item.with_type(pa.string()) if pa.types.is_null(item.type) else item for item in table.schema
            ]
            self._schema = pa.schema(fields)
            table = table.cast(self._schema)
            texts = [item.name for item in self._schema if pa.types.is_string(item.type)]
            # of numbers and times it costs more than it saves
            self._writer = pq.ParquetWriter(
                self._path, self._schema, compression="zstd", use_dictionary=texts or False
            )
        self._waiting.append(table)
        self._rows += len(table)
        if self._rows >= ROWS_OF_A_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._waiting and self._writer is not None:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._rows = [], 0

    def close(self) -> None:
        if self._writer is None:
            pq.write_table(pa.table({}), self._path)
        else:
            self._flush()
            self._writer.close()


ROWS_OF_A_GROUP = 100_000
"""Small groups make Parquet slow to read and large; a transfer that goes on skips whole ones."""


def _new_file(folder: Path | None) -> Path:
    """An empty file beside the one that it will replace, readable to other workers; else a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".noetl-transfer-", dir=folder)
    os.fchmod(handle, 0o644)
    os.close(handle)
    return Path(name)


async def _http(place: Place, chunks: AsyncIterator[Chunk], call: ToolCall, box: Toolbox) -> Outcome:
    """Sends each chunk as a JSON list."""
    tool, count = HttpTool(), 0
    async for chunk in chunks:
        rows = [json_row(row) for row in chunk.as_rows()]
        config: dict[str, Any] = {"method": "POST", **place.request, "json": rows}
        await tool.run(replace(call, config=config, auth=place.auth), box)
        count += len(rows)
    return Outcome(count, count)
