"""Tiers whose objects are rows: ``db`` and ``duckdb``.

``db`` stores them in PostgreSQL, in parts of a few megabytes in ``noetl.result_blob``. ``duckdb`` stores them in one
local file, for single-machine work that queries them later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from noetl_dagster.errors import StorageError
from noetl_dagster.storage import queries
from noetl_dagster.storage.tiers.base import (
    CHUNK,
    Bytes,
    TierTooSmallError,
    TierUnavailableError,
    WholeValues,
)

T = TypeVar("T")

_UNAVAILABLE = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server went away in the middle of a statement
)

_PREFIX = "db://result_blob/"


class DatabaseTier:
    """Objects as rows. The parts of one object are written in one transaction."""

    def __init__(self, pool: asyncpg.Pool | None) -> None:
        if pool is None:
            raise StorageError("db tier: this store has no database; set NOETL_DB_URL")
        self._pool = pool

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return _PREFIX + key

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
            await connection.execute(queries.DELETE_BLOB, key)
            part = 0
            async for data in _in_parts(chunks):
                await connection.execute(queries.PUT_BLOB_PART, key, part, data)
                part += 1
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        async with self._connection() as connection:
            rows = await connection.fetch(queries.GET_BLOB, uri.removeprefix(_PREFIX))
        if not rows:
            raise KeyError(uri)
        return rows[0]["data"] if len(rows) == 1 else b"".join(row["data"] for row in rows)

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory."""
        part = 0
        while True:
            async with self._connection() as connection:
                data = await connection.fetchval(queries.GET_BLOB_PART, uri.removeprefix(_PREFIX), part)
            if data is None and part == 0:
                raise KeyError(uri)
            if data is None:
                return
            yield data
            part += 1

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        async with self._connection() as connection:
            found = await connection.fetchval(queries.GET_BLOB_PART, uri.removeprefix(_PREFIX), 0)
        return found is not None

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        async with self._connection() as connection:
            await connection.execute(queries.DELETE_BLOB, uri.removeprefix(_PREFIX))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        last = prefix
        while True:
            async with self._connection() as connection:
                rows = await connection.fetch(queries.PAGE_OF_BLOB_KEYS, prefix, last)
            if not rows:
                return
            yield [row["key"] for row in rows]
            last = rows[-1]["key"]

    async def close(self) -> None:
        """Leaves the pool open; it belongs to its opener."""

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        try:
            async with self._pool.acquire(timeout=30) as connection:
                yield connection
        except _UNAVAILABLE as error:
            raise TierUnavailableError(f"db tier: PostgreSQL does not answer: {error}") from error


async def _in_parts(chunks: AsyncIterator[Bytes]) -> AsyncIterator[bytes]:
    """Cuts chunks of any size into parts of one size; an empty object is one empty part."""
    pending = bytearray()
    whole = 0
    async for chunk in chunks:
        view = memoryview(chunk)
        while view:
            take = CHUNK - len(pending)
            pending += view[:take]
            view = view[take:]
            if len(pending) == CHUNK:
                yield bytes(pending)
                pending.clear()
                whole += 1
    if pending or not whole:
        yield bytes(pending)


_LARGEST = 1024**3
_LOCK_SECONDS = 10.0

_CREATE_TABLE = "CREATE TABLE IF NOT EXISTS result (key VARCHAR PRIMARY KEY, data BLOB NOT NULL)"
_PUT_VALUE = "INSERT OR REPLACE INTO result VALUES (?, ?)"
_GET_VALUE = "SELECT data FROM result WHERE key = ?"
_KEYS_BELOW = "SELECT key FROM result WHERE starts_with(key, ?)"
_DELETE_VALUE = "DELETE FROM result WHERE key = ?"


class DuckDbTier(WholeValues):
    """Objects as rows of the table ``result``.

    A DuckDB file has one writing process at a time: it is opened for each operation and others wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._one_at_a_time = asyncio.Lock()

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return f"duckdb://{self._path.name}/{key}"

    async def ready(self) -> None:
        """Returns when the store answers."""
        await self._run(lambda connection: None)

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        if len(data) > _LARGEST:
            raise TierTooSmallError(
                f"duckdb tier: {len(data)} bytes are more than a value may have ({_LARGEST})"
            )
        await self._run(lambda connection: connection.execute(_PUT_VALUE, [key, bytes(data)]).fetchall())
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        row = await self._run(lambda connection: connection.execute(_GET_VALUE, [self._key(uri)]).fetchone())
        if row is None:
            raise KeyError(uri)
        value: bytes = row[0]
        return value

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        await self._run(lambda connection: connection.execute(_DELETE_VALUE, [self._key(uri)]).fetchall())

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        rows = await self._run(lambda connection: connection.execute(_KEYS_BELOW, [prefix]).fetchall())
        yield [key for (key,) in rows]

    async def close(self) -> None:
        """Has nothing to release."""

    def _key(self, uri: str) -> str:
        return uri.removeprefix(f"duckdb://{self._path.name}/")

    async def _run(self, action: Callable[[Any], T]) -> T:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._with_file, action)

    def _with_file(self, action: Callable[[Any], T]) -> T:
        import duckdb

        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                with duckdb.connect(str(self._path)) as connection:
                    connection.execute(_CREATE_TABLE)
                    return action(connection)
            except duckdb.IOException as error:
                if time.monotonic() > deadline:
                    raise TierUnavailableError(f"duckdb tier: cannot open {self._path}: {error}") from error
                time.sleep(0.02)  # another process has the file's lock for a moment: no growing pauses
