"""``kind: postgres``: SQL with bound parameters, one transaction a task, rows as JSON values."""

from __future__ import annotations

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.limits import count_of, time_limit
from noetl_dagster.tools.sql.connection import open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.large.stream import run_call, table_of
from noetl_dagster.tools.sql.prepare import prepare_statements
from noetl_dagster.tools.sql.statements import BoundStatement

TABLE_ROWS = 50_000
"""Rows of a chunk of a table where the task does not say."""


class PostgresTool(Tool):
    """Runs SQL.

    Input: ``auth`` (a postgres credential), ``command`` (text with one or more statements, or a list of
    them) or ``script``; ``params`` (default: the task's ``input``): a mapping binds ``:name``, a list
    ``$1, $2, ...``, and psycopg's ``%(name)s`` and ``%s`` mean the same; ``timeout`` seconds.

    Output: ``command_0``, ``command_1``, ... each ``{status, rows, row_count, columns}`` or
    ``{status, row_count}``; ``rows``, ``row_count`` and ``columns`` of the last one that returns rows stand
    beside them. Numerics are numbers where exact, else text; dates and times ISO 8601; bytea base64.

    The last statement's rows are read through a cursor. Where they are many, they are stored chunk by chunk while
    they come, and the result is a reference that templates read as the same mapping. ``chunk_size`` bounds the
    rows of a chunk; ``key`` names a column, unique and not null, by which the rows are ordered, so that a call that
    is taken up goes on after its last chunk instead of reading all of them again. With ``as: table`` (with
    ``chunk_size``, what is meant without ``as``) the rows of the one statement are a Parquet table by reference.

    All statements are one transaction, unless one cannot be in a transaction block (VACUUM, CREATE DATABASE,
    CALL, ...) or steers transactions itself. Errors carry ``pg.sqlstate``.
    """

    kind = "postgres"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        statements = await prepare_statements(call, box)
        if _as_table(call):
            return await self._table(call, box, statements)
        async with time_limit(call):
            try:
                return await self._run(call, box, statements)
            except asyncpg.InvalidCachedStatementError:
                # another session changed a table; nothing was done, and the caches are fresh now
                box.clients.statements(await open_pool(call, box)).clear()
                return await self._run(call, box, statements)

    async def _run(self, call: ToolCall, box: Toolbox, statements: list[BoundStatement]) -> ToolResult:
        with postgres_errors(call, box):
            shapes = box.clients.statements(await open_pool(call, box))
            async with open_connection(call, box, lone=ChunkWriter.is_wanted(call, box)) as connection:
                try:
                    return await run_call(connection, statements, shapes, call, box)
                except asyncpg.InvalidCachedStatementError:
                    await connection.reload_schema_state()
                    raise

    async def _table(self, call: ToolCall, box: Toolbox, statements: list[BoundStatement]) -> ToolResult:
        if len(statements) != 1:
            raise ToolError(
                f"postgres in step {call.step}: a table is made of the rows of one statement, "
                f"'command' has {len(statements)}; write as: rows",
                kind="schema",
            )
        async with time_limit(call):
            size = count_of(call, "chunk_size") or TABLE_ROWS
            return ToolResult(ref=await table_of(statements[0], call, box, size))


def _as_table(call: ToolCall) -> bool:
    given = call.config.get("as") or ("table" if call.config.get("chunk_size") else "rows")
    return str(given).lower() in ("table", "arrow", "parquet")
