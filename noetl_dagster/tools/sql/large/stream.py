"""Rows of postgres as they come: a small result is a value, a larger one is stored chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, cast

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.limits import count_of
from noetl_dagster.tools.sql.connection import NEVER_IDLE
from noetl_dagster.tools.sql.cursor import read_rows
from noetl_dagster.tools.sql.large.repeating import is_repeatable, lists_rows
from noetl_dagster.tools.sql.running import (
    ENOUGH,
    Shape,
    lines_of,
    promoted,
    remember,
    result_of,
    rows_of,
    run_one,
    run_statements,
    values_of,
)
from noetl_dagster.tools.sql.statements import BoundStatement, needs_own_transaction
from noetl_dagster.tools.sql.tables import listed

SAMPLE = 16
"""Rows whose size tells that of all that came with them."""

MOST = 2048
"""Rows that are asked for at a time."""

BATCH_BYTES = 256 * 1024
"""JSON bytes that are asked for at a time, about."""

HELD = 1 / 16
"""Part of a chunk up to which a result is no chunk, but a value."""

HAS_WRITTEN = "SELECT txid_current_if_assigned() IS NOT NULL"


async def run_call(
    connection: asyncpg.Connection,
    statements: Sequence[BoundStatement],
    shapes: dict[str, Shape],
    call: ToolCall,
    box: Toolbox,
) -> ToolResult:
    """Runs statements in one transaction where they allow it; the last one's rows are read through a cursor.

    Returns:
        The tool's mapping, or its reference where the last statement has many rows.
    """
    key = call.config.get("key")
    async with await ChunkWriter.open(
        call, box, seeks=bool(key), size=count_of(call, "chunk_size")
    ) as writer:
        if writer.is_whole:
            return ToolResult(ref=await writer.finish({}))
        if any(needs_own_transaction(statement.text) for statement in statements):
            return ToolResult(data=await run_statements(connection, statements, shapes))
        statement = statements[-1] if not key else _by_key(statements[-1], str(key), writer.position)
        rows = _LastRows(connection, statement, len(statements) - 1, shapes, writer, call, box)
        if len(statements) == 1 and (found := await rows.at_once()) is not None:
            return ToolResult(data=promoted([found]))
        async with connection.transaction():
            results = [
                await run_one(connection, one, shapes, index) for index, one in enumerate(statements[:-1])
            ]
            found = await rows.at_once() if results else None
            results.append(await rows.through_cursor() if found is None else found)
        if not rows.in_chunks:
            return ToolResult(data=promoted(results))
        at = ("rows", f"command_{rows.index}.rows")
        return ToolResult(ref=await writer.finish(promoted(results), at))


class _LastRows:
    """The last statement of a call."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        statement: BoundStatement,
        index: int,
        shapes: dict[str, Shape],
        writer: ChunkWriter,
        call: ToolCall,
        box: Toolbox,
    ) -> None:
        self.index = index
        self.in_chunks = False
        self._connection = connection
        self._statement = statement
        self._shapes = shapes
        self._writer = writer
        self._call = call
        self._box = box
        self._batch = min(BATCH_BYTES, box.settings.chunk_bytes // 8)
        self._key = call.config.get("key")
        self._before: Any = writer.position
        self._wanted = ChunkWriter.is_wanted(call, box)

    async def at_once(self) -> dict[str, Any] | None:
        """The result, where it takes no transaction; None where it does.

        That is where there are no rows, or no more than the statement lists, and where few came the last time from one
        that can run again should there be many now.
        """
        text, connection = self._statement.text, self._connection
        shape = self._shapes.get(text)
        if shape is None:
            shape = Shape.of(await connection.prepare(text))
            remember(self._shapes, text, shape)
        if not shape.returns_rows or (lists_rows(text) and not self._wanted):
            return await run_one(connection, self._statement, self._shapes, self.index)
        if self._wanted or self._key or shape.rows is None:
            return None
        if shape.repeatable is None:
            shape.repeatable = await is_repeatable(connection, text)
        if not shape.repeatable:
            return None
        values, most = values_of(self._statement, shape, self.index), shape.enough
        # a fetch with a limit: of public methods only fetchrow has one
        records = await connection._execute(text, values, most, None)
        if len(records) >= most or (records and tuple(records[0].keys()) != shape.columns):
            return None
        return _value(records, shape)

    async def through_cursor(self) -> dict[str, Any]:
        """The result inside of a transaction, without its rows where they are in chunks."""
        if self._wanted:
            await self._connection.execute(NEVER_IDLE)
        prepared = await self._connection.prepare(self._statement.text)
        shape = self._shapes.get(self._statement.text)
        if shape is None or self._key:
            shape = Shape.of(prepared)
        # the iterator of a cursor binds and fetches in one round trip
        portal = prepared.cursor(*values_of(self._statement, shape, self.index), prefetch=1).__aiter__()
        # a step that takes chunks has to get the same ones again from a process that knows nothing of the last time
        first = ENOUGH if self._wanted else shape.enough
        records = await portal._bind_exec(self._room(first), None)
        if records and tuple(records[0].keys()) != shape.columns:  # select * of a table that was altered
            shape = Shape.of(prepared, shape)
        remember(self._shapes, self._statement.text, shape)
        held, size = records, 0
        while not portal._exhausted and not self._wanted:
            size += _json_bytes(records, shape)
            if size > HELD * self._box.settings.chunk_bytes:
                break
            records = await portal._exec(self._room(self._most(len(held), size)), None)
            held += records
        if portal._exhausted and not self._wanted:
            return _value(held, shape)
        self.in_chunks = True
        if self._box.chunks is not None:  # what is not committed yet may still be undone
            self._writer.holds_back = await self._connection.fetchval(HAS_WRITTEN)
        for start in range(0, len(held), ENOUGH):
            await self._store(held[start : start + ENOUGH], shape)
        most, held = self._most(len(held), size), []
        while not portal._exhausted:
            records = await portal._exec(self._room(most), None)
            most = self._most(len(records), await self._store(records, shape))
        shape.rows = None
        return result_of([], shape) | {"row_count": self._writer.rows}

    async def _store(self, records: Sequence[asyncpg.Record], shape: Shape) -> int:
        """Hands rows to the writer; gives their bytes."""
        size = 0
        while records:
            some, records = records[: self._room(len(records))], records[self._room(len(records)) :]
            lines = lines_of(some, shape)
            size += len(lines.data)
            await self._writer.take(lines, self._position(some, shape))
        self._box.progress(self._call, f"{self._writer.rows} rows read")
        return size

    def _most(self, rows: int, size: int) -> int:
        """Rows to ask for next, after so many of so many JSON bytes."""
        return max(1, min(MOST, 2 * rows, rows * self._batch // max(1, size)))

    def _room(self, most: int) -> int:
        return most if self._writer.room is None else max(1, min(most, self._writer.room))

    def _position(self, records: Sequence[asyncpg.Record], shape: Shape) -> Any:
        """Where a run that is taken up goes on: after the last key."""
        if not self._key:
            return None
        if self._key not in shape.columns:
            raise self._bad_key(f"is none of the columns: {', '.join(shape.columns)}")
        convert = dict(shape.converters).get(self._key, lambda value: value)
        first, last = convert(records[0][self._key]), convert(records[-1][self._key])
        if last is None or first is None:
            raise self._bad_key("is null in a row")
        if first == self._before:
            raise self._bad_key(f"is {first!r} in two rows")
        self._before = last
        return last

    def _bad_key(self, what: str) -> ToolError:
        return ToolError(
            f"postgres in step {self._call.step}: key {self._key!r} {what}; it names a column whose values are "
            "unique and not null, by which the rows are ordered",
            kind="schema",
        )


def _value(records: Sequence[asyncpg.Record], shape: Shape) -> dict[str, Any]:
    shape.rows = len(records)
    return result_of(rows_of(records, shape), shape)


def _json_bytes(records: Sequence[asyncpg.Record], shape: Shape) -> int:
    """Bytes of records as JSON, about: by a few of them."""
    sample = records[:: max(1, len(records) // SAMPLE)]
    return len(lines_of(sample, shape).data) * len(records) // max(1, len(sample))


def _by_key(statement: BoundStatement, key: str, position: Any) -> BoundStatement:
    """The statement in the order of a column, from after a position."""
    column, text, values = listed([key]), statement.text.rstrip().rstrip(";"), statement.values
    after = ""
    if position is not None:
        values = (*values, position)
        after = f" WHERE {column} > ${len(values)}"
    return BoundStatement(f"SELECT * FROM (\n{text}\n) AS keyed{after} ORDER BY {column}", values)


async def table_of(statement: BoundStatement, call: ToolCall, box: Toolbox, size: int) -> ResultRef:
    """Runs the call's one statement through a cursor and stores its rows as Parquet, so many at a time.

    Returns:
        The reference of one table; ``extra["rows"]`` is the number of rows.

    Raises:
        ToolError: for whatever the server refuses.
    """
    from noetl_dagster.tools.rows.files import arrow_rows  # Arrow, for those who want tables

    async with await ChunkWriter.open(call, box) as writer:
        if writer.is_whole:
            return await writer.finish()
        schema = None
        async with aclosing(cast(Any, read_rows(statement, call, box, size))) as chunks:
            async for rows in chunks:
                table = await asyncio.to_thread(arrow_rows, rows, schema)
                schema = table.schema
                await writer.put(table)
                box.progress(call, f"{writer.rows} rows read")
        if schema is None:
            await writer.put(arrow_rows([]))
        return await writer.finish()
