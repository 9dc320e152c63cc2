"""``kind: postgres``: SQL with bound parameters, one transaction a task, rows as JSON values."""

from __future__ import annotations

from typing import Any

import asyncpg

from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.limits import time_limit
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.prepare import prepare_statements
from noetl_dagster.tools.sql.running import run_statements
from noetl_dagster.tools.sql.statements import BoundStatement


class PostgresTool(Tool):
    """Runs SQL.

    Input: ``auth`` (a postgres credential), ``command`` (text with one or more statements, or a list of
    them) or ``script``; ``params`` (default: the task's ``input``): a mapping binds ``:name``, a list
    ``$1, $2, ...``, and psycopg's ``%(name)s`` and ``%s`` mean the same; ``timeout`` seconds.

    Output: ``command_0``, ``command_1``, ... each ``{status, rows, row_count, columns}`` or
    ``{status, row_count}``; ``rows``, ``row_count`` and ``columns`` of the last one that returns rows stand
    beside them. Numerics are numbers where exact, else text; dates and times ISO 8601; bytea base64.

    With ``chunk_size``, the rows of the one statement are read through a cursor, so many at a time, and the
    result is a Parquet table by reference; for results that memory should not hold.

    All statements are one transaction, unless one cannot be in a transaction block (VACUUM, CREATE DATABASE,
    CALL, ...) or steers transactions itself. Errors carry ``pg.sqlstate``.
    """

    kind = "postgres"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        if call.config.get("chunk_size"):
            from noetl_dagster.tools.sql.stream import stream_rows  # Arrow, for those who stream

            async with time_limit(call):
                return ToolResult(ref=await stream_rows(call, box, int(call.config["chunk_size"])))
        statements = await prepare_statements(call, box)
        async with time_limit(call):
            try:
                return ToolResult(data=await self._run(call, box, statements))
            except asyncpg.InvalidCachedStatementError:
                # another session changed a table; nothing was done, and the caches are fresh now
                box.clients.statements(await open_pool(call, box)).clear()
                return ToolResult(data=await self._run(call, box, statements))

    async def _run(self, call: ToolCall, box: Toolbox, statements: list[BoundStatement]) -> dict[str, Any]:
        with postgres_errors(call, box):
            pool = await open_pool(call, box)
            shapes = box.clients.statements(pool)
            async with pool.acquire() as connection:
                return await run_statements(connection, statements, shapes)
