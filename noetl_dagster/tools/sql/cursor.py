"""Rows of one statement through a server-side cursor, one chunk in memory at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.values import parameter
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.statements import BoundStatement


async def read_rows(
    statement: BoundStatement, call: ToolCall, box: Toolbox, size: int, *, readonly: bool = False
) -> AsyncIterator[list[Mapping[str, Any]]]:
    """The rows of a statement in chunks of at most ``size``, with the values of the server's own types.

    Raises:
        ToolError: for whatever the server refuses.
    """
    with postgres_errors(call, box):
        pool = await open_pool(call, box)
        async with pool.acquire() as connection, connection.transaction(readonly=readonly):
            prepared = await connection.prepare(statement.text)
            types = [item.name for item in prepared.get_parameters()]
            values = [parameter(value, name) for value, name in zip(statement.values, types, strict=True)]
            cursor = await prepared.cursor(*values)
            while records := await cursor.fetch(size):
                yield [dict(record) for record in records]
