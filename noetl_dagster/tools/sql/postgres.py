"""``kind: postgres``: SQL with bound parameters, one transaction a task; many rows are stored chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, count_of, time_limit
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.sql.connection import NEVER_IDLE, open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.fetching import HELD, TABLE_ROWS, store_table
from noetl_dagster.tools.sql.running import (
    ENOUGH,
    Shape,
    Shapes,
    lines_of,
    numbers_of,
    prepare_statements,
    promoted,
    result_of,
    run_one,
    run_statements,
    values_of,
    wants_table,
)
from noetl_dagster.tools.sql.statements import (
    BoundStatement,
    is_repeatable,
    lists_rows,
    needs_own_transaction,
)
from noetl_dagster.tools.sql.tables import declared_decimals, quoted

if TYPE_CHECKING:
    import pyarrow as pa


async def read_tables(
    statement: BoundStatement, call: ToolCall, context: ToolContext, size: int
) -> AsyncIterator[pa.Table]:
    """Yields the rows of a statement as Arrow tables of at most ``size`` rows, by the types of the columns."""
    from noetl_dagster.tools.rows.arrow import arrow_table, arrow_types  # imports Arrow, which only tables need

    with postgres_errors(call):
        wanted = context.chunks.wanted(call)
        async with open_connection(call, context, lone=wanted) as connection, connection.transaction():
            if wanted:
                await connection.execute(NEVER_IDLE)
            prepared = await connection.prepare(statement.text)
            shape = Shape.of(prepared)
            values = values_of(statement, shape, 0)
            types = dict(zip(shape.columns, shape.types, strict=True))
            doubles = [name for name, kind in types.items() if kind == "numeric" and numbers_of(call) is Numbers.FLOAT]
            types |= dict.fromkeys(doubles, "float8")
            kinds = arrow_types(types, await declared_decimals(connection, types, statement.text, values))
            cursor, schema, count = await prepared.cursor(*values), None, 0
            while records := await cursor.fetch(size):
                rows = [dict(record) for record in records]
                for name in doubles:
                    for row in rows:
                        row[name] = None if row[name] is None else float(row[name])
                table = await asyncio.to_thread(arrow_table, rows, schema, kinds, count)
                schema, count = table.schema, count + len(rows)
                yield table


class PostgresTool(Tool):
    """Runs SQL.

    Input: ``auth`` (a postgres credential), ``command`` (text with one or more statements, or a list of
    them) or ``script``; ``params`` (default: the task's ``input``): a mapping binds ``:name``, a list
    ``$1, $2, ...``, and psycopg's ``%(name)s`` and ``%s`` mean the same; ``timeout`` seconds.

    Output: ``command_0``, ``command_1``, ... each ``{status, rows, row_count, columns}`` or ``{status, row_count}``;
    also ``rows``, ``row_count`` and ``columns`` of the last one that returns rows. Numerics are text, or doubles with
    ``numbers: float``; dates and times ISO 8601; bytea base64; intervals text.

    The last statement's rows are read through a cursor. If they are many, they are stored chunk by chunk while they
    are read, and the result is a reference that templates read as the same mapping. ``chunk_size`` limits the rows of
    a chunk; ``key`` names a column, unique and not null, by which the rows are ordered, so that a call that runs
    again resumes after its last chunk instead of reading all of them again. With ``as: table`` (the default with
    ``chunk_size``) the rows of the one statement are a Parquet table by reference.

    All statements run in one transaction, unless one cannot run in a transaction block (VACUUM, CREATE DATABASE,
    CALL, ...) or controls transactions itself. Errors carry ``pg.sqlstate``.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the call's statements."""
        statements = await prepare_statements(call, context)
        if wants_table(call, "table" if call.config.get("chunk_size") else "rows"):
            return await self._table(call, context, statements)
        async with time_limit(call):
            try:
                return await self._run(call, context, statements)
            except asyncpg.InvalidCachedStatementError:
                # another session has altered a table; nothing was done, and the caches are up to date now
                context.clients.statements(await open_pool(call, context)).clear()
                return await self._run(call, context, statements)

    async def _run(self, call: ToolCall, context: ToolContext, statements: list[BoundStatement]) -> ToolResult:
        with postgres_errors(call):
            numbers, facts = numbers_of(call), context.clients.statements(await open_pool(call, context))
            shapes = facts.setdefault(numbers, Shapes(numbers))
            async with open_connection(call, context, lone=context.chunks.wanted(call)) as connection:
                try:
                    return await run_call(connection, statements, shapes, call, context)
                except asyncpg.InvalidCachedStatementError:
                    await connection.reload_schema_state()
                    raise

    async def _table(self, call: ToolCall, context: ToolContext, statements: list[BoundStatement]) -> ToolResult:
        """Stores the rows of the one statement as Parquet, chunk by chunk, read through a cursor."""
        size = count_of(call, "chunk_size") or TABLE_ROWS
        return await store_table(call, context, statements, partial(read_tables, statements[0], call, context, size))


SAMPLE = 16  # rows whose size is measured to estimate that of a batch
MOST = 2048  # rows that are fetched at a time
BATCH_BYTES = 256 * 1024  # JSON that is fetched at a time, about
HAS_WRITTEN = "SELECT txid_current_if_assigned() IS NOT NULL"


async def run_call(
    connection: asyncpg.Connection,
    statements: Sequence[BoundStatement],
    shapes: Shapes,
    call: ToolCall,
    context: ToolContext,
) -> ToolResult:
    """Runs statements in one transaction if they allow it; the last one's rows are read through a cursor."""
    key = call.config.get("key")
    size = count_of(call, "chunk_size")
    async with await ChunkWriter.open(call, context, seeks=bool(key), size=size) as writer:
        if writer.is_whole:
            return ToolResult(ref=await writer.finish({}))
        if any(needs_own_transaction(statement.text) for statement in statements):
            return ToolResult(data=await run_statements(connection, statements, shapes))
        statement = statements[-1] if not key else _by_key(statements[-1], str(key), writer.position)
        rows = _PostgresRows(connection, statement, len(statements) - 1, shapes, writer, call, context)
        if len(statements) == 1 and (small := await rows.at_once()) is not None:
            return ToolResult(data=promoted([small]))
        async with connection.transaction():
            results = [await run_one(connection, one, shapes, index) for index, one in enumerate(statements[:-1])]
            small = await rows.at_once() if results else None
            results.append(await rows.through_cursor() if small is None else small)
        if not rows.in_chunks:
            return ToolResult(data=promoted(results))
        at = ("rows", f"command_{rows.index}.rows")
        return ToolResult(ref=await writer.finish(promoted(results), at))


@dataclass(slots=True, eq=False)
class _PostgresRows:
    """The rows of the last statement of a call."""

    connection: asyncpg.Connection
    statement: BoundStatement
    index: int
    shapes: Shapes
    writer: ChunkWriter
    call: ToolCall
    tool_context: ToolContext
    in_chunks: bool = False
    _key: str | None = None
    _last_key: Any = None
    _wanted: bool = False

    def __post_init__(self) -> None:
        self._key, self._last_key = self.call.config.get("key"), self.writer.position
        self._wanted = self.tool_context.chunks.wanted(self.call)

    async def at_once(self) -> dict[str, Any] | None:
        """Returns the result if it needs no transaction; None if it does.

        It needs none if there are no rows, or no more than the statement lists, or if there were few the last time
        and the statement can run again should there be many now.
        """
        text, connection = self.statement.text, self.connection
        shape = self.shapes.get(text)
        if shape is None:
            shape = self.shapes.add(text, await connection.prepare(text))
        if not shape.columns or (lists_rows(text) and not self._wanted):
            return await run_one(connection, self.statement, self.shapes, self.index)
        if self._wanted or self._key or shape.rows is None:
            return None
        if shape.repeatable is None:
            shape.repeatable = await is_repeatable(connection, text)
        if not shape.repeatable:
            return None
        values, most = values_of(self.statement, shape, self.index), shape.enough
        # a fetch with a limit: of public methods only fetchrow has one
        records = await connection._execute(text, values, most, None)
        if len(records) >= most or (records and tuple(records[0].keys()) != shape.columns):
            return None
        return result_of(records, shape)

    async def through_cursor(self) -> dict[str, Any]:
        """Returns the result inside of a transaction, without its rows if they are stored in chunks."""
        if self._wanted:
            await self.connection.execute(NEVER_IDLE)
        prepared = await self.connection.prepare(self.statement.text)
        shape = self.shapes.get(self.statement.text)
        if shape is None or self._key:
            shape = self.shapes.add(self.statement.text, prepared)
        # the iterator of a cursor binds and fetches in one round trip
        portal = prepared.cursor(*values_of(self.statement, shape, self.index), prefetch=1).__aiter__()
        # a step that takes chunks has to get the same ones from a process that has not run the statement before
        first = ENOUGH if self._wanted else shape.enough
        records = await portal._bind_exec(self._room(first), None)
        if records and tuple(records[0].keys()) != shape.columns:  # select * of a table that was altered
            shape = self.shapes.add(self.statement.text, prepared)
        held, size = records, 0
        while not portal._exhausted and not self._wanted:
            size += _json_bytes(records, shape)
            if size > HELD * self.tool_context.settings.chunk_bytes:
                break
            records = await portal._exec(self._room(self._most(len(held), size)), None)
            held += records
        if portal._exhausted and not self._wanted:
            return result_of(held, shape)
        self.in_chunks = True
        # uncommitted changes may still be undone
        self.writer.holds_back = await self.connection.fetchval(HAS_WRITTEN)
        for start in range(0, len(held), ENOUGH):
            await self._store(held[start : start + ENOUGH], shape)
        most, held = self._most(len(held), size), []
        while not portal._exhausted:
            records = await portal._exec(self._room(most), None)
            most = self._most(len(records), await self._store(records, shape))
        result = result_of([], shape) | {"row_count": self.writer.rows}
        shape.rows = None
        return result

    async def _store(self, records: Sequence[asyncpg.Record], shape: Shape) -> int:
        """Passes rows to the writer; returns their bytes."""
        size = 0
        while records:
            some, records = records[: self._room(len(records))], records[self._room(len(records)) :]
            lines = lines_of(some, shape, self.writer.rows)
            size += len(lines.data)
            await self.writer.take(lines, self._position(some, shape))
        self.tool_context.progress(self.call, f"{self.writer.rows} rows read")
        return size

    def _most(self, rows: int, size: int) -> int:
        """Returns the number of rows to fetch next, after ``rows`` rows of ``size`` JSON bytes."""
        batch = min(BATCH_BYTES, self.tool_context.settings.chunk_bytes // 8)
        return max(1, min(MOST, 2 * rows, rows * batch // max(1, size)))

    def _room(self, most: int) -> int:
        return most if self.writer.room is None else max(1, min(most, self.writer.room))

    def _position(self, records: Sequence[asyncpg.Record], shape: Shape) -> Any:
        """Returns the position at which a later run resumes: after the last key."""
        if not self._key:
            return None
        if self._key not in shape.columns:
            raise self._bad_key(f"is none of the columns: {', '.join(shape.columns)}")
        convert = shape.converters.get(self._key, lambda value: value)
        first, last = convert(records[0][self._key]), convert(records[-1][self._key])
        if last is None or first is None:
            raise self._bad_key("is null in a row")
        if first == self._last_key:
            raise self._bad_key(f"is {first!r} in two rows")
        self._last_key = last
        return last

    def _bad_key(self, what: str) -> ToolError:
        return self.call.error(
            f"key {self._key!r} {what}; it names a column whose values are unique and not null, by which the rows are "
            "ordered"
        )


def _json_bytes(records: Sequence[asyncpg.Record], shape: Shape) -> int:
    """Estimates the bytes of records as JSON from a few of them."""
    sample = records[:: max(1, len(records) // SAMPLE)]
    return len(lines_of(sample, shape).data) * len(records) // max(1, len(sample))


def _by_key(statement: BoundStatement, key: str, position: Any) -> BoundStatement:
    """Returns the statement in the order of a column, from after a position."""
    column, text, values = quoted(key), statement.text.rstrip().rstrip(";"), statement.values
    after = ""
    if position is not None:
        values = (*values, position)
        after = f" WHERE {column} > ${len(values)}"
    return BoundStatement(f"SELECT * FROM (\n{text}\n) AS keyed{after} ORDER BY {column}", values)
