"""Where a transfer writes: PostgreSQL with COPY, DuckDB, files and objects, http."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import obstore

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_identifier
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.http import HttpTool
from noetl_dagster.tools.rows.copy_text import copy_lines
from noetl_dagster.tools.rows.files import Row, arrow_rows, json_row, row_writer
from noetl_dagster.tools.rows.formats import row_format
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.tables import (
    DELETE_ALL_ROWS,
    Table,
    WriteMode,
    columns_of,
    conflict_clause,
    describe_table,
    listed,
    upsert_key,
)
from noetl_dagster.tools.transfer.places import Place, PlaceKind, object_place
from noetl_dagster.tools.transfer.sources import Chunks

STAGE = "noetl_transfer_stage"
ORDINAL = "noetl_ordinal"

# quoted identifiers only; the rows travel by COPY
CREATE_STAGE = "CREATE TEMP TABLE {stage} ON COMMIT DROP AS SELECT {columns} FROM {table} WITH NO DATA"
NUMBER_STAGE = "ALTER TABLE {stage} ADD COLUMN {ordinal} bigserial"
MERGE_STAGE = (
    "INSERT INTO {table} ({columns}) SELECT DISTINCT ON ({key}) {columns} FROM {stage} "
    "ORDER BY {key}, {ordinal} DESC"
)


async def write_chunks(place: Place, chunks: Chunks, mode: WriteMode, call: ToolCall, box: Toolbox) -> int:
    """Writes all rows to a place, and gives their number. Tables change all at once or not at all."""
    match place.kind:
        case PlaceKind.POSTGRES:
            return await _postgres(place, chunks, mode, call, box)
        case PlaceKind.DUCKDB:
            return await _duckdb(place, chunks, mode, call)
        case PlaceKind.OBJECT:
            return await _object(place, chunks, mode, call, box)
        case PlaceKind.HTTP:
            return await _http(place, chunks, call, box)
        case PlaceKind.RESULT:
            raise ToolError("transfer: a result is no target; use the artifact tool", kind="schema")


async def _postgres(place: Place, chunks: Chunks, mode: WriteMode, call: ToolCall, box: Toolbox) -> int:
    with postgres_errors(call, box):
        pool = await open_pool(replace(call, auth=place.auth), box)
        async with pool.acquire() as connection, connection.transaction():
            table = await describe_table(connection, place.table)
            if mode is WriteMode.REPLACE:
                await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
            first = await anext(chunks, None)
            if first is None:
                return 0
            columns = columns_of(first, table)
            if mode is WriteMode.UPSERT:
                return await _merge(connection, table, columns, place, first, chunks)
            schema, name = await connection.fetchrow(SELECT_RELATION, table.name)
            return await _copy(connection, name, table, columns, first, chunks, schema=schema)


SELECT_RELATION = """
SELECT namespace.nspname, class.relname
FROM pg_class AS class JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.oid = to_regclass($1)
"""


async def _merge(
    connection: asyncpg.Connection,
    table: Table,
    columns: list[str],
    place: Place,
    first: list[Row],
    rest: Chunks,
) -> int:
    """Copies into a stage, then upserts from it; of rows with the same key the last one wins."""
    key = upsert_key(table, place.key)
    names = {"stage": STAGE, "table": table.name, "columns": listed(columns), "ordinal": ORDINAL}
    await connection.execute(CREATE_STAGE.format(**names))
    await connection.execute(NUMBER_STAGE.format(**names))
    count = await _copy(connection, STAGE, table, columns, first, rest)
    merge = MERGE_STAGE.format(**names, key=listed(key)) + conflict_clause(key, columns)
    await connection.execute(merge)
    return count


async def _copy(
    connection: asyncpg.Connection,
    name: str,
    table: Table,
    columns: list[str],
    first: list[Row],
    rest: Chunks,
    *,
    schema: str | None = None,
) -> int:
    count = 0

    async def lines() -> AsyncIterator[bytes]:
        nonlocal count
        async for rows in _chain(first, rest):
            columns_of(rows, table)
            count += len(rows)
            yield copy_lines(rows, columns, table.columns)

    await connection.copy_to_table(name, schema_name=schema, source=lines(), columns=columns, format="text")
    return count


async def _chain(first: list[Row], rest: Chunks) -> Chunks:
    yield first
    async for chunk in rest:
        yield chunk


async def _duckdb(place: Place, chunks: Chunks, mode: WriteMode, call: ToolCall) -> int:
    """Makes the table when it is missing, from the first chunk."""
    if place.database is None:
        raise ToolError("transfer: a duckdb target needs 'database', a file", kind="schema")
    connection = await asyncio.to_thread(duckdb.connect, str(Path(call.folder, place.database)))
    table, key = sql_identifier(place.table), list(place.key)
    if mode is WriteMode.UPSERT and not key:
        raise ToolError("transfer: upsert into duckdb needs 'key': its unique columns", kind="schema")
    try:
        await asyncio.to_thread(connection.execute, "BEGIN")
        count = 0
        async for rows in chunks:
            await asyncio.to_thread(_insert_arrow, connection, table, rows, mode if not count else None, key)
            count += len(rows)
        await asyncio.to_thread(connection.execute, "COMMIT")
        return count
    finally:
        await asyncio.to_thread(connection.close)


def _insert_arrow(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    rows: list[Row],
    first: WriteMode | None,
    key: list[str],
) -> None:
    connection.register("noetl_chunk", arrow_rows(rows))
    if first is not None:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM noetl_chunk LIMIT 0")
    if first is WriteMode.REPLACE:
        connection.execute(f"DELETE FROM {table}")
    if key:
        same = " AND ".join(f"{table}.{name} = noetl_chunk.{name}" for name in map(sql_identifier, key))
        connection.execute(f"DELETE FROM {table} USING noetl_chunk WHERE {same}")
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM noetl_chunk")
    connection.unregister("noetl_chunk")


async def _object(place: Place, chunks: Chunks, mode: WriteMode, call: ToolCall, box: Toolbox) -> int:
    """Writes a local file, then moves or uploads it as a whole: readers never see half of it."""
    if mode is not WriteMode.REPLACE:
        raise ToolError("transfer: an object can only be replaced; write mode: replace", kind="schema")
    format = row_format(place.format, place.path)
    store, key = await object_place(place, call, box)
    local, count = await asyncio.to_thread(_new_file, None if store is not None else Path(key).parent), 0
    try:
        writer = row_writer(local, format)
        with contextlib.closing(writer):
            async for rows in chunks:
                await asyncio.to_thread(writer.write, rows)
                count += len(rows)
        if store is None:
            await asyncio.to_thread(local.replace, key)
        else:
            await obstore.put_async(store, key, local)
    finally:
        await asyncio.to_thread(local.unlink, missing_ok=True)
    return count


def _new_file(folder: Path | None) -> Path:
    """An empty file beside the one that it will replace, readable to other workers; else a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".noetl-transfer-", dir=folder)
    os.fchmod(handle, 0o644)
    os.close(handle)
    return Path(name)


async def _http(place: Place, chunks: Chunks, call: ToolCall, box: Toolbox) -> int:
    """Sends each chunk as a JSON list."""
    tool, count = HttpTool(), 0
    async for rows in chunks:
        config: dict[str, Any] = {"method": "POST", **place.request, "json": [json_row(row) for row in rows]}
        await tool.run(replace(call, config=config, auth=place.auth), box)
        count += len(rows)
    return count
