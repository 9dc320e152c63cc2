"""Tiers whose objects are rows: ``db`` and ``duckdb``.

``db`` stores them in PostgreSQL, in parts of a few megabytes in ``noetl.result_blob``. ``duckdb`` stores them in one
local file, for single-machine work that queries them later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from noetl_dagster.errors import StorageError
from noetl_dagster.events.connection import CONNECTION_LOST
from noetl_dagster.private_files import private_folder
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, Tier, TierTooSmallError, TierUnavailableError

_PUT_PART = "INSERT INTO noetl.result_blob (key, part, data) VALUES ($1, $2, $3)"
_GET_PARTS = "SELECT data FROM noetl.result_blob WHERE key = $1 ORDER BY part"
_GET_PART = "SELECT data FROM noetl.result_blob WHERE key = $1 AND part = $2"
_SIZE = "SELECT sum(octet_length(data))::bigint FROM noetl.result_blob WHERE key = $1"
_PAGE_OF_KEYS = """
    SELECT key FROM noetl.result_blob
    WHERE starts_with(key, $1) AND key > $2 AND part = 0
    ORDER BY key LIMIT 1000
"""
_DELETE_PARTS = "DELETE FROM noetl.result_blob WHERE key = $1"


class DatabaseTier(Tier):
    """Objects as rows. The parts of one object are written in one transaction."""

    root = "db://result_blob/"

    def __init__(self, pool: asyncpg.Pool | None) -> None:
        if pool is None:
            raise StorageError("db tier: this store has no database; set NOETL_DB_URL")
        self._pool = pool

    async def ready(self) -> None:
        """Returns when the store answers."""
        async with self._connection() as connection:
            await connection.fetchval("SELECT 1")

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""

        async def one() -> AsyncIterator[Bytes]:
            yield data

        return await self.put_stream(key, one())

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        async with self._connection() as connection, connection.transaction():
            await connection.execute(_DELETE_PARTS, key)
            part, pending = 0, bytearray()
            async for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    take = CHUNK - len(pending)
                    pending += view[:take]
                    view = view[take:]
                    if len(pending) == CHUNK:
                        await connection.execute(_PUT_PART, key, part, bytes(pending))
                        part += 1
                        pending.clear()
            if pending or not part:  # an empty object is one empty part
                await connection.execute(_PUT_PART, key, part, bytes(pending))
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        async with self._connection() as connection:
            rows = await connection.fetch(_GET_PARTS, self.key(uri))
        if not rows:
            raise KeyError(uri)
        return rows[0]["data"] if len(rows) == 1 else b"".join(row["data"] for row in rows)

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory."""
        part = 0
        while True:
            async with self._connection() as connection:
                data = await connection.fetchval(_GET_PART, self.key(uri), part)
            if data is None and part == 0:
                raise KeyError(uri)
            if data is None:
                return
            yield data
            part += 1

    async def size(self, uri: str) -> int:
        """Returns the number of bytes of an object."""
        async with self._connection() as connection:
            length = await connection.fetchval(_SIZE, self.key(uri))
        if length is None:
            raise KeyError(uri)
        return int(length)

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        async with self._connection() as connection:
            await connection.execute(_DELETE_PARTS, self.key(uri))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        last = prefix
        while True:
            async with self._connection() as connection:
                rows = await connection.fetch(_PAGE_OF_KEYS, prefix, last)
            if not rows:
                return
            yield [row["key"] for row in rows]
            last = rows[-1]["key"]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        try:
            async with self._pool.acquire(timeout=30) as connection:
                yield connection
        except CONNECTION_LOST as error:
            raise TierUnavailableError(f"db tier: PostgreSQL does not answer: {error}") from error


_LARGEST = 1024**3
_LOCK_SECONDS = 10.0

_CREATE_TABLE = "CREATE TABLE IF NOT EXISTS result (key VARCHAR PRIMARY KEY, data BLOB NOT NULL)"
_PUT_VALUE = "INSERT OR REPLACE INTO result VALUES (?, ?)"
_GET_VALUE = "SELECT data FROM result WHERE key = ?"
_KEYS_BELOW = "SELECT key FROM result WHERE starts_with(key, ?)"
_DELETE_VALUE = "DELETE FROM result WHERE key = ?"


class DuckDbTier(Tier):
    """Objects as rows of the table ``result``.

    A DuckDB file has one writing process at a time: it is opened for each operation and others wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.root = f"duckdb://{self._path.name}/"
        self._one_at_a_time = asyncio.Lock()

    async def ready(self) -> None:
        """Returns when the store answers."""
        await self._fetch("SELECT 1")

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        if len(data) > _LARGEST:
            raise TierTooSmallError(f"duckdb tier: {len(data)} bytes are more than a value may have ({_LARGEST})")
        await self._fetch(_PUT_VALUE, key, bytes(data))
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        rows = await self._fetch(_GET_VALUE, self.key(uri))
        if not rows:
            raise KeyError(uri)
        value: bytes = rows[0][0]
        return value

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        await self._fetch(_DELETE_VALUE, self.key(uri))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        yield [key for (key,) in await self._fetch(_KEYS_BELOW, prefix)]

    async def _fetch(self, query: str, *values: Any) -> list[Any]:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._fetch_now, query, values)

    def _fetch_now(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        import duckdb

        private_folder(self._path.parent)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                with duckdb.connect(str(self._path)) as connection:
                    connection.execute(_CREATE_TABLE)
                    rows: list[Any] = connection.execute(query, values).fetchall()
                    return rows
            except duckdb.IOException as error:
                if time.monotonic() > deadline:
                    raise TierUnavailableError(f"duckdb tier: cannot open {self._path}: {error}") from error
                time.sleep(0.02)  # another process has the file's lock for a moment: no growing pauses
