"""Rows on their way from one end to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.files import Row, arrow_rows
from noetl_dagster.tools.transfer.options import OnDrift

T = TypeVar("T")
Put = Callable[[T], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows: mappings, an Arrow table, or bytes of COPY.

    ``after``, JSON, is where a source that can seek goes on behind them.
    """

    data: Any
    after: Any = None

    @property
    def rows(self) -> int:
        """Their number; of bytes only in the text format, where each is a line."""
        return self.data.count(b"\n") if isinstance(self.data, bytes) else len(self.data)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the rows fill.

        Raises:
            ToolError: a table has one twice.
        """
        if isinstance(self.data, pa.Table):
            names = tuple(self.data.column_names)
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ToolError(f"transfer: the source has column {twice!r} twice", kind="schema")
            return names
        return tuple(dict.fromkeys(chain.from_iterable(self.data)))

    def as_rows(self) -> list[Row]:
        rows: list[Row] = self.data
        if isinstance(self.data, pa.Table) and self.columns:
            rows = self.data.to_pylist()
        return rows

    def as_table(self, schema: pa.Schema | None = None) -> pa.Table:
        """An Arrow table of the given schema, or of the one that the values show."""
        if not isinstance(self.data, pa.Table):
            return arrow_rows(self.data, schema)
        return self.data if schema is None else fitted(self.data, schema)

    def only(self, columns: Sequence[str]) -> Chunk:
        """Without other columns than these."""
        if isinstance(self.data, pa.Table):
            return Chunk(self.data.select(list(columns)), self.after)
        kept = frozenset(columns)
        return Chunk(
            [{name: value for name, value in row.items() if name in kept} for row in self.data], self.after
        )


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table with the columns and types of a schema; columns that it lacks are null."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


class Source(Protocol):
    """Where rows come from.

    Attributes:
        seeks: it can go on in the middle, so that what is stored is not read again.
        bytes: about how large it is, where that is known beforehand.
    """

    seeks: bool
    bytes: int

    async def identity(self) -> str:
        """Changes when the source is another one than before; empty where nobody can say."""
        ...

    def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        """The rows, from the beginning or behind what an earlier chunk called ``after``."""
        ...


async def sliced(rows: list[Row] | pa.Table, size: int, after: Any = None) -> AsyncIterator[Chunk]:
    """Rows in chunks; only behind the last one can be gone on."""
    for start in range(0, len(rows), size):
        part = rows.slice(start, size) if isinstance(rows, pa.Table) else rows[start : start + size]
        yield Chunk(part, after if start + size >= len(rows) else None)


async def piped(fill: Callable[[Put[T]], Awaitable[object]], most: int) -> AsyncIterator[T]:
    """What ``fill`` puts, at most so many items ahead of their use; then what it raised."""
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    room = asyncio.Semaphore(most)

    async def put(item: T) -> None:
        await room.acquire()
        queue.put_nowait((item,))

    filling = asyncio.ensure_future(fill(put))
    filling.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (found := await queue.get()) is not None:
            room.release()
            yield found[0]
        await filling
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


def ahead(items: AsyncIterator[T], most: int = 2) -> AsyncIterator[T]:
    """The same items, of which the next are made while one is used."""

    async def forward(put: Put[T]) -> None:
        async for item in items:
            await put(item)

    return piped(forward, most)


class Drift:
    """What a transfer makes of new columns.

    Attributes:
        added, ignored: their names, in the order in which they came.
    """

    def __init__(self, told: OnDrift, target: str, columns: Iterable[str]) -> None:
        self._told, self._target = told, target
        self.columns = list(columns)
        self.added: dict[str, str] = {}
        self.ignored: list[str] = []

    def sort(self, columns: Sequence[str], type_of: Callable[[str], str]) -> tuple[list[str], dict[str, str]]:
        """The columns to write, and those of them that the target does not have yet, with their types.

        Raises:
            ToolError: the target lacks columns, and was not told what to do then.
        """
        new = [name for name in columns if name not in self.columns]
        if new and self._told is OnDrift.ERROR:
            raise ToolError(
                f"{self._target} has no column {', '.join(map(str, new))}; its columns: "
                f"{', '.join(self.columns)}. Write on_drift: add or ignore, or name the columns to read",
                kind="schema",
                code="42703",
            )
        if self._told is OnDrift.IGNORE:
            self.ignored += [name for name in new if name not in self.ignored]
            return [name for name in columns if name not in new], {}
        types = {name: type_of(name) for name in new}
        self.columns += new
        self.added |= types
        return list(columns), types

    def report(self) -> dict[str, list[str]]:
        """What the result says."""
        named = {"added": list(self.added), "ignored": self.ignored}
        return {word: names for word, names in named.items() if names}


def postgres_type(chunk: Chunk, column: str) -> str:
    """The type of a new column of PostgreSQL for the values that a chunk has in it."""
    if isinstance(chunk.data, pa.Table):
        return _of_arrow(chunk.data.schema.field(column).type)
    return _of_values({type(row[column]) for row in chunk.data if row.get(column) is not None})


def duckdb_type(chunk: Chunk, column: str) -> str:
    """As :func:`postgres_type`, of DuckDB."""
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


def _of_arrow(kind: Any) -> str:
    if pa.types.is_dictionary(kind):
        return _of_arrow(kind.value_type)
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _of_arrow(kind.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    if pa.types.is_nested(kind):
        return "jsonb"
    return next((name for test, name in _SIMPLE if test(kind)), "text")


_OF_VALUES: Mapping[frozenset[str], str] = {
    frozenset({"bool"}): "boolean",
    frozenset({"int"}): "bigint",
    frozenset({"float"}): "double precision",
    frozenset({"int", "float"}): "double precision",
    frozenset({"Decimal"}): "numeric",
    frozenset({"datetime"}): "timestamptz",
    frozenset({"date"}): "date",
    frozenset({"time"}): "time",
    frozenset({"timedelta"}): "interval",
    frozenset({"bytes"}): "bytea",
    frozenset({"UUID"}): "uuid",
    frozenset({"dict"}): "jsonb",
    frozenset({"list"}): "jsonb",
    frozenset({"dict", "list"}): "jsonb",
}


def _of_values(kinds: set[type]) -> str:
    return _OF_VALUES.get(frozenset(kind.__name__ for kind in kinds), "text")
