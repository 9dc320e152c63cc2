"""PostgreSQL as a source: bytes of COPY for another PostgreSQL, or Arrow tables."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

import asyncpg
import pyarrow as pa
from pyarrow import csv as arrow_csv

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.rows.arrow import arrow_table, arrow_types
from noetl_dagster.tools.rows.columns import check_names, column_type, moment_text
from noetl_dagster.tools.rows.values import parameter
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.statements import split_statements
from noetl_dagster.tools.sql.tables import declared_decimals, listed, quoted
from noetl_dagster.tools.transfer.chunks import Put, TransferChunk, TransferSource, piped, sliced
from noetl_dagster.tools.transfer.options import TransferEnd

COPY_BLOCK = 128 << 10  # bytes of COPY that are passed on at a time; its messages have some kilobytes
CSV_BLOCK = 4 << 20  # bytes of CSV that become one Arrow table
BLOCKS_AHEAD = 2

_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")


@dataclass(eq=False)
class PostgresSource(TransferSource):
    """A table or query. Reading can resume if ``order_by`` names unique columns.

    Attributes:
        types: the server's type of each column, in order.
        kinds: the Arrow types of columns; its chunks are Arrow tables then. None: they are rows of Python values.
        seeks_by_row: its chunks, not only those of COPY, have positions.
        copied: rows of the last COPY by its own account; None before its end.
    """

    connection: asyncpg.Connection
    query: str
    values: Sequence[Any]
    types: Mapping[str, str]
    order_by: Sequence[str]
    size: int
    kinds: Mapping[str, pa.DataType] | None
    copied: int | None = None
    _copying: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        self.seeks = bool(self.order_by)
        self.seeks_by_row = self.seeks and all(column_type(self.types[name]).is_key for name in self.order_by)

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields Arrow tables if they are wanted, else rows of Python values."""
        query, values = self._following(tuple(self.types), after)
        count = 0
        if self.kinds is not None and all(column_type(kind).is_copied for kind in self.types.values()):
            async for block in self._out(query, values, "csv", CSV_BLOCK):
                table = await asyncio.to_thread(self._table, block, count)
                count += len(table)
                async for chunk in sliced(table, self.size):
                    yield TransferChunk(chunk.data, self._key_of(chunk.data.slice(len(chunk.data) - 1)))
            return
        if self.kinds is not None:  # the digits of JSON are those of its text
            texts = [name for name, kind in self.types.items() if kind in ("json", "jsonb")]
            query, values = self._following(tuple(self.types), after, texts)
        cursor = await self.connection.cursor(query, *values)
        schema = None
        while records := await cursor.fetch(self.size):
            rows: Any = [dict(record) for record in records]
            if self.kinds is not None:
                rows = await asyncio.to_thread(arrow_table, rows, schema, self.kinds, count)
                schema = rows.schema
            count += len(rows)
            yield TransferChunk(rows, self._key_of(records[-1:]))

    def _key_of(self, last: pa.Table | Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Returns the key of a single row as text; None if a part of it is null, or its text is not the server's."""
        if not self.seeks_by_row:
            return None
        [row] = last.to_pylist() if isinstance(last, pa.Table) else last
        values = [row[name] for name in self.order_by]
        if None in values:
            return None
        return [str(moment_text(value)) if isinstance(value, datetime) else str(value) for value in values]

    async def copy(self, columns: Sequence[str], format: str, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields bytes of COPY; in the text format from the row after a key on, in the order of ``order_by``."""
        query, values = self._following(columns, after)
        places = [columns.index(name) for name in self.order_by]
        async for block in self._out(query, values, format, COPY_BLOCK):
            yield TransferChunk(block, _last_key(block, places) if places and format == "text" else None)

    def _following(self, columns: Sequence[str], after: Any, texts: Collection[str] = ()) -> tuple[str, list[Any]]:
        """Returns the query and its values for the rows after a key, in the order of ``order_by``.

        Args:
            texts: columns that are cast to text.
        """
        query, values = self.query, list(self.values)
        if tuple(columns) != tuple(self.types) or self.order_by or texts:
            names = (f"{quoted(name)}::text" if name in texts else quoted(name) for name in columns)
            query = f"SELECT {', '.join(names)} FROM ({query}\n) AS source"
        if after is not None:
            query += f" WHERE {self._compared('>')}"
            values += after
        if self.order_by:
            query += f" ORDER BY {listed(self.order_by)}"
        return query, values

    async def rows_until(self, after: Sequence[str]) -> int:
        """Returns the number of rows up to a key."""
        query = f"SELECT count(*) FROM ({self.query}\n) AS source WHERE {self._compared('<=')}"
        return int(await self.connection.fetchval(query, *self.values, *after))

    def _compared(self, sign: str) -> str:
        """Returns a condition on the key; its values are the parameters after those of the query."""
        numbered = enumerate(self.order_by, len(self.values) + 1)
        places = (f"${number}::text::{self.types[name]}" for number, name in numbered)
        return f"({listed(self.order_by)}) {sign} ({', '.join(places)})"

    async def checksum(self, digest: str) -> str:
        """Returns the value of an aggregate, given as SQL, over all rows."""
        query = f"SELECT {digest} FROM ({self.query}\n) AS source"
        return str(await self.connection.fetchval(query, *self.values))

    async def close(self) -> None:
        """Cancels a COPY that is still running."""
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)

    async def settings(self) -> dict[str, str]:
        """Returns the connection's settings on which the text of values depends."""
        names = ("timezone", "datestyle", "intervalstyle", "extra_float_digits", "bytea_output")
        return {name: await self.connection.fetchval("SELECT current_setting($1)", name) for name in names}

    async def _out(self, query: str, values: Sequence[Any], format: str, size: int) -> AsyncIterator[bytes]:
        """Yields COPY in blocks of whole rows, of at least ``size`` bytes."""

        async def copied(put: Put[bytes]) -> None:
            collected = bytearray()

            async def collect(rows: bytes) -> None:
                nonlocal collected
                collected += rows
                if len(collected) >= size:
                    block, collected = bytes(collected), bytearray()
                    await put(block)

            self._copying = asyncio.current_task()
            tag = await self.connection.copy_from_query(query, *values, output=collect, format=format)
            self.copied = int(tag.rpartition(" ")[2])
            if collected:
                await put(bytes(collected))

        async with aclosing(cast(Any, piped(copied, BLOCKS_AHEAD))) as blocks:
            async for block in blocks:
                yield block

    def _table(self, block: bytes, first: int) -> pa.Table:
        """Parses CSV of COPY; ``first`` is the number of the rows before it, for errors."""
        kinds = dict(self.kinds or {})
        try:
            return arrow_csv.read_csv(
                io.BytesIO(block),
                read_options=arrow_csv.ReadOptions(column_names=list(self.types), use_threads=False),
                parse_options=arrow_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=kinds,
                    null_values=[""],
                    true_values=["t"],
                    false_values=["f"],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            match = _CSV_COLUMN.match(str(error))
            name = "" if match is None else f"column {list(self.types)[int(match[1])]}, "
            raise ToolError(
                f"transfer: {name}after row {first}: {error}; convert it in source.query", kind="transform"
            ) from None


def _last_key(block: bytes, places: Sequence[int]) -> list[str] | None:
    """Returns the key of the last line of COPY text; None if a part of it is null, or text with escapes."""
    line = block[block.rfind(b"\n", 0, -1) + 1 : -1]
    fields = line.split(b"\t")
    values = [fields[place] for place in places]
    return None if any(b"\\" in value for value in values) else [value.decode() for value in values]


@asynccontextmanager
async def open_postgres(
    end: TransferEnd, call: ToolCall, context: ToolContext, size: int, *, tables: bool, snapshot: bool
) -> AsyncIterator[PostgresSource]:
    """Opens the source in one transaction on a connection of the pool.

    Args:
        tables: its chunks are Arrow tables.
        snapshot: it is read more than once, with the same rows each time.
    """
    own, statement = replace(call, auth=end.auth), end.statement()
    statements = split_statements(statement.text)
    if len(statements) != 1:
        raise call.error("source.query must be one statement that gives rows")
    isolation = "repeatable_read" if snapshot or end.order_by else None
    with postgres_errors(own):
        pool = await open_pool(own, context)
        async with (
            pool.acquire() as connection,
            connection.transaction(isolation=isolation, readonly=not end.query),
        ):
            await connection.execute("SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres'")
            prepared = await connection.prepare(statements[0])
            values = [
                parameter(value, item.name)
                for value, item in zip(statement.values, prepared.get_parameters(), strict=True)
            ]
            attributes = prepared.get_attributes()
            check_names((attribute.name for attribute in attributes), "source.query")
            types = {attribute.name: _type_name(attribute.type) for attribute in attributes}
            missing = [name for name in end.order_by if name not in types]
            if missing:
                raise call.error(
                    f"source.order_by names {', '.join(missing)}, which the source does not give; it gives "
                    f"{', '.join(types)}"
                )
            kinds = None
            if tables:
                table = "" if end.query else sql_identifier(end.table)
                kinds = arrow_types(types, await declared_decimals(connection, types, statements[0], values, table))
            source = PostgresSource(connection, statements[0], values, types, end.order_by, size, kinds)
            if end.order_by:
                source.bytes = await _estimate(connection, statements[0], values)
            try:
                yield source
            finally:
                await source.close()


async def _estimate(connection: asyncpg.Connection, query: str, values: Sequence[Any]) -> int:
    """Returns the bytes of all rows as the planner estimates them."""
    [explained] = await connection.fetchval(f"EXPLAIN (FORMAT json) {query}", *values)
    return int(explained["Plan"]["Plan Rows"] * explained["Plan"]["Plan Width"])


def _type_name(type: Any) -> str:
    """Returns the name as in ``pg_type.typname``, with the schema for a type of a user."""
    element = type.name.removesuffix("[]")
    name = f"_{element}" if element != type.name else element
    return name if type.schema == "pg_catalog" else f'"{type.schema}"."{name}"'
