"""Rows on their way from the source to the target, and columns that the target lacks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar, cast

import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.rows.arrow import Row
from noetl_dagster.tools.sql.tables import Drift, kind_of_value, type_of_kinds
from noetl_dagster.tools.transfer.options import TransferEnd, TransferOptions

T = TypeVar("T")
Put = Callable[[T], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TransferChunk:
    """Some rows: mappings, an Arrow table, or bytes of COPY.

    ``after`` is the position behind them, as JSON; None when the source cannot resume there.
    """

    data: Any
    after: Any = None

    @property
    def rows(self) -> int:
        """The number of rows; for bytes only in the text format, which has one row per line."""
        return self.data.count(b"\n") if isinstance(self.data, bytes) else len(self.data)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the rows fill; raises ``ToolError`` if a table has one twice."""
        if isinstance(self.data, pa.Table):
            names = tuple(self.data.column_names)
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ToolError(f"transfer: the source has column {twice!r} twice", kind="schema")
            return names
        return tuple(dict.fromkeys(chain.from_iterable(self.data)))

    def as_rows(self) -> list[Row]:
        """Returns the rows as mappings."""
        if isinstance(self.data, pa.Table):
            return self.data.to_pylist() if self.columns else []
        rows: list[Row] = self.data
        return rows

    def only(self, columns: Sequence[str]) -> TransferChunk:
        """Returns the rows without any other columns than these."""
        if isinstance(self.data, pa.Table):
            return TransferChunk(self.data.select(list(columns)), self.after)
        names = frozenset(columns)
        rows = [{name: value for name, value in row.items() if name in names} for row in self.data]
        return TransferChunk(rows, self.after)


class TransferSource(ABC):
    """The source of a transfer.

    Attributes:
        seeks: reading can resume at a position, so that staged rows are not read again.
        bytes: an estimate of its size; 0 if unknown.
        identity: changes when the source does; empty if that cannot be determined.
    """

    seeks = True
    bytes = 0
    identity = ""

    async def rows_until(self, after: Any) -> int | None:
        """Returns the number of rows up to a position; None if the identity shows whether they have changed."""
        return None

    @abstractmethod
    def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows, from the beginning or from the ``after`` of an earlier chunk."""


@dataclass(slots=True)
class Transfer:
    """One transfer: its source, target and options, and the call that asks for it.

    Attributes:
        chunk_count: chunks of rows so far; bytes of COPY are not counted.
    """

    source: TransferSource
    target: TransferEnd
    options: TransferOptions
    call: ToolCall
    tool_context: ToolContext
    chunk_count: int = 0
    _rows: int = 0
    _bytes: int = 0

    def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows of the source, watched."""
        return self.watch(self.source.chunks(after))

    async def watch(self, chunks: AsyncIterator[TransferChunk]) -> AsyncIterator[TransferChunk]:
        """Yields chunks and reports progress to the worker, so that a long transfer keeps its claim."""
        async with aclosing(cast(Any, chunks)) as stream:
            async for chunk in stream:
                yield chunk
                if isinstance(chunk.data, bytes):
                    self._bytes += len(chunk.data)
                    self.tool_context.progress(self.call, f"{self._bytes >> 20} MB transferred")
                else:
                    self.chunk_count += 1
                    self._rows += chunk.rows
                    self.tool_context.progress(self.call, f"{self._rows} rows transferred")


@dataclass(slots=True)
class TransferOutcome:
    """The facts of a transfer that its result reports."""

    rows: int
    written: int
    checksum: str | None = None
    verified: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, list[str]] = field(default_factory=dict)
    resumed: int | None = None


async def sliced(rows: list[Row] | pa.Table, size: int, after: Any = None) -> AsyncIterator[TransferChunk]:
    """Yields rows in chunks; only the last one has the position after them."""
    for start in range(0, len(rows), size):
        part = rows.slice(start, size) if isinstance(rows, pa.Table) else rows[start : start + size]
        yield TransferChunk(part, after if start + size >= len(rows) else None)


async def piped(fill: Callable[[Put[T]], Awaitable[object]], most: int) -> AsyncIterator[T]:
    """Yields the items that ``fill`` puts, which runs at most ``most`` items ahead; then raises its error."""
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    room = asyncio.Semaphore(most)

    async def put(item: T) -> None:
        await room.acquire()
        queue.put_nowait((item,))

    filling = asyncio.ensure_future(fill(put))
    filling.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (queued := await queue.get()) is not None:
            room.release()
            yield queued[0]
        await filling
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


def ahead(items: AsyncIterator[T], most: int = 2) -> AsyncIterator[T]:
    """Yields the same items, and makes the next ones while one is used."""

    async def forward(put: Put[T]) -> None:
        async for item in items:
            await put(item)

    return piped(forward, most)


def without_new(drift: Drift, chunk: TransferChunk) -> TransferChunk:
    """Returns a chunk for a file, which takes no new columns."""
    columns, _ = drift.sort(chunk.columns, str)
    return chunk.only(columns)


def postgres_type(chunk: TransferChunk, column: str) -> str:
    """Returns the PostgreSQL type of a new column for the values of a chunk."""
    if isinstance(chunk.data, pa.Table):
        return _arrow_type_name(chunk.data.schema.field(column).type)
    return type_of_kinds(kind_of_value(row[column]) for row in chunk.data if row.get(column) is not None)


def duckdb_type(chunk: TransferChunk, column: str) -> str:
    """Returns the DuckDB type of a new column for the values of a chunk."""
    type_name = postgres_type(chunk, column)
    return {"double precision": "DOUBLE", "jsonb": "JSON", "bytea": "BLOB"}.get(type_name, type_name)


_SIMPLE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: kind in (pa.int8(), pa.int16(), pa.uint8()), "smallint"),
    (lambda kind: kind in (pa.int32(), pa.uint16()), "integer"),
    (lambda kind: kind == pa.uint64(), "numeric"),
    (pa.types.is_integer, "bigint"),
    (lambda kind: kind == pa.float32(), "real"),
    (pa.types.is_floating, "double precision"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "interval"),
    (pa.types.is_interval, "interval"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_fixed_size_binary, "bytea"),
)


def _arrow_type_name(kind: Any) -> str:
    if pa.types.is_dictionary(kind):
        return _arrow_type_name(kind.value_type)
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _arrow_type_name(kind.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    if pa.types.is_nested(kind):
        return "jsonb"
    return next((name for test, name in _SIMPLE if test(kind)), "text")
