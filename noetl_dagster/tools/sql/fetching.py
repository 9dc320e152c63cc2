"""Rows of statements: fetched by a thread, held while they are few, else stored in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from noetl_dagster.storage import codec
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult, time_limit
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.rows.columns import check_names

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

FETCHED = 2048  # rows at a time
INTERRUPT_SECONDS = 1.0  # between interrupts of a statement
TABLE_ROWS = 50_000  # of a chunk of a table by default
HELD = 1 / 16  # part of a chunk up to which a result is a value instead of chunks


class FetchedRows:
    """The rows of the last statement of a call.

    Attributes:
        in_chunks: they are stored in chunks.
    """

    def __init__(self, writer: ChunkWriter, call: ToolCall, context: ToolContext) -> None:
        self.in_chunks = context.chunks.wanted(call)
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._held: list[dict[str, Any]] = []
        self._size = 0
        self._most = HELD * context.settings.chunk_bytes

    def take(self, batches: Iterable[list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], int]:
        """Returns all rows and their number; no rows if they are stored in chunks."""
        for rows in batches:
            if not self.in_chunks:
                self._held += rows
                self._size += codec.byte_length(rows)
                self.in_chunks = self._size > self._most
                rows = self._held
            if self.in_chunks:
                self._held = []
                asyncio.run_coroutine_threadsafe(self._writer.add(rows), self._loop).result()
        return self._held, self._writer.rows if self.in_chunks else len(self._held)


def result_of_batches(
    batches: Iterable[list[dict[str, Any]]], columns: Sequence[str], last: FetchedRows | None
) -> dict[str, Any]:
    """Returns the result of a statement that returns rows; ``last`` takes those of the last one.

    Raises:
        ToolError: two columns have one name.
    """
    check_names(columns, "the result")
    if last is not None:
        rows, count = last.take(batches)
    else:
        rows = [row for batch in batches for row in batch]
        count = len(rows)
    return {"status": "ok", "rows": rows, "row_count": count, "columns": list(columns)}


async def store_table(
    call: ToolCall, context: ToolContext, statements: Sequence[Any], tables: Callable[[], AsyncIterator[pa.Table]]
) -> ToolResult:
    """Stores the rows of the one statement as Parquet, chunk by chunk, while ``tables`` reads them."""
    if len(statements) != 1:
        raise call.error(
            f"a table is made of the rows of one statement, 'command' has {len(statements)}; write as: rows"
        )
    async with time_limit(call), await ChunkWriter.open(call, context) as writer:
        if writer.is_whole:
            return ToolResult(ref=await writer.finish())
        async with aclosing(cast(Any, tables())) as chunks:
            async for table in chunks:
                await writer.put(table)
                context.progress(call, f"{writer.rows} rows read")
        if not writer.rows:
            import pyarrow as pa  # only tables need it

            await writer.put(pa.table({}))
        return ToolResult(ref=await writer.finish())


async def interruptible(job: Coroutine[Any, Any, T], interrupt: Callable[[], object]) -> T:
    """Awaits a thread; on cancellation interrupts its statement and waits until the connection is free.

    It interrupts again and again: the thread may have been between two statements.
    """
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            await asyncio.to_thread(interrupt)
            await asyncio.wait([task], timeout=INTERRUPT_SECONDS)
        await asyncio.gather(task, return_exceptions=True)
        raise
