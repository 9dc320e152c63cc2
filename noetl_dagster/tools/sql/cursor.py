"""Rows of one statement through a server-side cursor, one chunk in memory at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.rows.values import parameter
from noetl_dagster.tools.sql.connection import NEVER_IDLE, open_connection, postgres_errors
from noetl_dagster.tools.sql.statements import BoundStatement


async def read_rows(
    statement: BoundStatement, call: ToolCall, box: Toolbox, size: int
) -> AsyncIterator[list[Mapping[str, Any]]]:
    """The rows of a statement in chunks of at most ``size``, with the values of the server's own types.

    Raises:
        ToolError: for whatever the server refuses.
    """
    with postgres_errors(call, box):
        wanted = ChunkWriter.is_wanted(call, box)
        async with open_connection(call, box, lone=wanted) as connection, connection.transaction():
            if wanted:
                await connection.execute(NEVER_IDLE)
            prepared = await connection.prepare(statement.text)
            types = [item.name for item in prepared.get_parameters()]
            values = [parameter(value, name) for value, name in zip(statement.values, types, strict=True)]
            cursor = await prepared.cursor(*values)
            while records := await cursor.fetch(size):
                yield [dict(record) for record in records]
