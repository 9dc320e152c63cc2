"""Copies rows into a PostgreSQL table by COPY, and moves them from a stage to their table."""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.copy_csv import encode_csv
from noetl_dagster.tools.sql.tables import (
    Drift,
    SqlTable,
    WriteMode,
    add_columns,
    conflict_clause,
    listed,
    quoted,
    upsert_key,
)
from noetl_dagster.tools.transfer.checksum import Checksum, compare_checksums, rows_digest
from noetl_dagster.tools.transfer.chunks import (
    Transfer,
    TransferChunk,
    TransferOutcome,
    ahead,
    postgres_type,
)
from noetl_dagster.tools.transfer.options import Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

ORDINAL = "noetl_ordinal"

# quoted identifiers only; the rows travel by COPY
MERGE = (
    "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT DISTINCT ON ({key}) {columns} FROM {stage} "
    "ORDER BY {key}, {ordinal} DESC"
)
MOVE = "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {stage}"
DIGEST_MOVED = "WITH moved AS ({move} RETURNING {columns}) SELECT {digest} FROM moved"
READ_AS_TEXT = "noetl_transfer_read"
RELATION = """
SELECT namespace.nspname, class.relname
FROM pg_class AS class JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.oid = to_regclass($1)
"""
BASE_TYPES = """
SELECT attname, format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0
"""

_SAME_BYTES = """
    bool int2 int4 int8 float4 float8 numeric text varchar bpchar name bytea date time timetz timestamp timestamptz
    interval uuid json jsonb inet cidr macaddr bit varbit
""".split()  # noqa: SIM905
"""Types whose binary form is the same in every server."""

CHECKED_BYTES = 16 << 20  # of rows that are kept to be copied a second time, for their checksum


class Copier:
    """Copies the rows of a source, with one COPY for each run of chunks that fill the same columns.

    Attributes:
        read, written: rows that the source yielded, and that the table took according to COPY.
        columns: those that were filled.
        checksum: of the rows that were read, if it is requested and the source is not PostgreSQL.
    """

    def __init__(self, connection: asyncpg.Connection, into: SqlTable, drift: Drift, transfer: Transfer) -> None:
        self._connection, self._into, self._drift, self._transfer = connection, into, drift, transfer
        self._source = transfer.source
        is_checked = transfer.options.verify is Verify.CHECKSUM
        self._checked = is_checked and not isinstance(self._source, PostgresSource)
        self._resumable = False
        self._fixed: list[str] | None = None
        self._format = "csv"
        self._chunks: AsyncIterator[TransferChunk]
        self._next: TransferChunk | None = None
        self.read = self.written = 0
        self.columns: dict[str, None] = {}
        self.checksum = Checksum()

    async def start(self, *, after: Any = None, resumable: bool = False) -> None:
        """Determines the columns if the source knows them, and begins to read after a position."""
        source, self._resumable = self._source, resumable
        if isinstance(source, PostgresSource):
            self._fixed = await self._sorted(list(source.types), source.types.__getitem__)
            same = all(
                source.types[name] == self._into.columns[name] and source.types[name].removeprefix("_") in _SAME_BYTES
                for name in self._fixed
            )
            self._format = "binary" if same and not resumable else "text"
            chunks = source.copy(self._fixed, self._format, after)
        else:
            chunks = ahead(source.chunks(after), 1)
        self._chunks = self._transfer.watch(chunks)

    async def ready(self) -> bool:
        """Waits for the next chunk; returns False after the last one."""
        if self._next is None:
            self._next = await anext(self._chunks, None)
        return self._next is not None

    async def step(self, seconds: float = math.inf) -> Any:
        """Runs one COPY, which ends when the columns change or after ``seconds``; returns the position after it."""
        assert self._next is not None
        columns = self._fixed or await self._sorted(self._next.columns, partial(postgres_type, self._next))
        fixed, due, after, rows_sent = self._fixed is not None, time.monotonic() + seconds, None, 0
        names = frozenset() if fixed else frozenset(self._next.columns)
        unchecked = io.BytesIO()

        async def blocks() -> AsyncIterator[bytes]:
            nonlocal after, rows_sent
            while (chunk := self._next) is not None and (fixed or frozenset(chunk.columns) == names):
                block = await self._encoded(chunk, columns)
                yield block
                if self._checked:
                    unchecked.write(block)
                rows_sent += chunk.rows
                after, self._next = chunk.after, None
                if after is not None and time.monotonic() >= due:
                    break
                if unchecked.tell() >= CHECKED_BYTES and (after is not None or not self._resumable):
                    break
                await self.ready()

        schema, name = await self._connection.fetchrow(RELATION, self._into.name)
        source = blocks() if fixed else ahead(blocks())
        async with aclosing(cast(Any, source)) as stream:
            tag = await self._connection.copy_to_table(
                name, schema_name=schema, source=stream, columns=columns, format=self._format
            )
        if self._checked:
            self.checksum += await self._checksum(unchecked, columns)
        if self._format == "binary":  # whose rows only the server can count
            rows_sent = cast(PostgresSource, self._source).copied or 0
        self.read += rows_sent
        self.written += _count(tag)
        self.columns |= dict.fromkeys(columns)
        return after

    async def _encoded(self, chunk: TransferChunk, columns: Sequence[str]) -> bytes:
        if isinstance(chunk.data, bytes):
            return chunk.data
        return await asyncio.to_thread(encode_csv, chunk.data, columns, self._into.columns)

    async def _checksum(self, text: io.BytesIO, columns: Sequence[str]) -> Checksum:
        """Returns the checksum of rows as they were read: the server casts their text to the columns' types."""
        texts = ", ".join(f"{quoted(name)} text" for name in columns)
        await self._connection.execute(f"CREATE TEMP TABLE {READ_AS_TEXT} ({texts})")
        text.seek(0)
        await self._connection.copy_to_table(READ_AS_TEXT, source=text, columns=columns, format=self._format)
        types = await self._base_types()
        digest = rows_digest(columns, self._into.columns, lambda name: f"{quoted(name)}::{types[name]}")
        digest_text = await self._connection.fetchval(f"SELECT {digest} FROM {READ_AS_TEXT}")
        await self._connection.execute(f"DROP TABLE {READ_AS_TEXT}")
        return Checksum.of_text(digest_text)

    async def _sorted(self, names: Sequence[str], type_of: Any) -> list[str]:
        columns, new = self._drift.sort(names, type_of)
        if names and not columns:
            raise ToolError(f"the source has none of the columns of table {self._into.name}", kind="schema")
        await add_columns(self._connection, self._into, new)
        return columns

    async def move(self, table: SqlTable) -> TransferOutcome:
        """Moves the rows from the stage to their table; raises ``ToolError`` if that did not take them as they were."""
        connection, stage, options = self._connection, self._into, self._transfer.options
        outcome, columns = TransferOutcome(self.read, self.written), list(self.columns)
        if options.verify is not Verify.NONE:
            compare_counts(self.read, self.written, stage)
        await add_columns(connection, table, dict(self._drift.added))
        names = {"stage": stage.name, "table": table.name, "columns": listed(columns), "ordinal": ORDINAL}
        keys = upsert_keys(self._transfer, table)
        if keys:
            move = MERGE.format(**names, key=listed(keys)) + conflict_clause(keys, columns)
        else:
            move = MOVE.format(**names)
        if options.verify is Verify.CHECKSUM and columns:
            read = await self._checksum_read(columns)
            digest = rows_digest(columns, (stage if keys else table).columns)
            # without keys the rows are compared as the table's triggers left them
            query = (
                f"SELECT {digest} FROM {stage.name}"
                if keys
                else DIGEST_MOVED.format(move=move, columns=names["columns"], digest=digest)
            )
            stored = Checksum.of_text(await connection.fetchval(query))
            compare_checksums(read, stored, f"table {table.name}", kind="db")
            outcome.checksum, outcome.written = str(stored), stored.rows
        if columns and (keys or outcome.checksum is None):
            outcome.written = _count(await connection.execute(move))
        if options.verify is not Verify.NONE and not keys:
            compare_counts(self.read, outcome.written, table)
        outcome.drift = self._drift.report()
        return outcome

    async def _checksum_read(self, columns: Sequence[str]) -> object:
        """Returns the checksum of the rows that were read, with their values in the types of the table."""
        source, stage = self._source, self._into
        if not isinstance(source, PostgresSource):
            return self.checksum
        for name, setting in (await source.settings()).items():
            await self._connection.execute("SELECT set_config($1, $2, true)", name, setting)
        types = await self._base_types()

        def value(name: str) -> str:
            cast = "" if source.types[name] == stage.columns[name] else f"::text::{types[name]}"
            return f"{quoted(name)}{cast}"

        return await source.checksum(rows_digest(columns, stage.columns, value))

    async def _base_types(self) -> dict[str, str]:
        """Returns the types of the columns, quoted and without their lengths and scales."""
        return dict(await self._connection.fetch(BASE_TYPES, self._into.name))


def upsert_keys(transfer: Transfer, table: SqlTable) -> Sequence[str]:
    """Returns the unique columns of an upsert, where the last of several rows with the same key wins; else nothing."""
    return upsert_key(table, transfer.target.key) if transfer.options.mode is WriteMode.UPSERT else ()


def compare_counts(read: int, written: int, table: SqlTable) -> None:
    """Raises ``ToolError`` if the target did not take as many rows as were read."""
    if read != written:
        raise ToolError(
            f"{read} rows were read, and table {table.name} took {written}; a trigger or rule keeps some away? "
            "The table is as it was. With verify: none this is no error",
            kind="db",
        )


def _count(tag: str) -> int:
    """Returns the number of rows in the server's message."""
    return int(tag.rpartition(" ")[2])
