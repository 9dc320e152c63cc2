"""Tier ``db``: results in PostgreSQL, in parts of a few megabytes in ``noetl.result_blob``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from noetl_dagster.errors import StorageError
from noetl_dagster.storage import queries
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, TierUnavailableError

AWAY = (
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
        return _PREFIX + key

    async def ready(self) -> None:
        async with self._connection() as connection:
            await connection.fetchval("SELECT 1")

    async def put(self, key: str, data: Bytes) -> str:
        async def one() -> AsyncIterator[Bytes]:
            yield data

        return await self.put_stream(key, one())

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        async with self._connection() as connection, connection.transaction():
            await connection.execute(queries.DELETE_BLOB, key)
            part = 0
            async for data in _in_parts(chunks):
                await connection.execute(queries.PUT_BLOB_PART, key, part, data)
                part += 1
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        async with self._connection() as connection:
            rows = await connection.fetch(queries.GET_BLOB, uri.removeprefix(_PREFIX))
        if not rows:
            raise KeyError(uri)
        return rows[0]["data"] if len(rows) == 1 else b"".join(row["data"] for row in rows)

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
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
        async with self._connection() as connection:
            found = await connection.fetchval(queries.GET_BLOB_PART, uri.removeprefix(_PREFIX), 0)
        return found is not None

    async def delete(self, uri: str) -> None:
        async with self._connection() as connection:
            await connection.execute(queries.DELETE_BLOB, uri.removeprefix(_PREFIX))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        last = prefix
        while True:
            async with self._connection() as connection:
                rows = await connection.fetch(queries.PAGE_OF_BLOB_KEYS, prefix, last)
            if not rows:
                return
            yield [row["key"] for row in rows]
            last = rows[-1]["key"]

    async def close(self) -> None:
        """The pool belongs to whoever opened it."""

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        try:
            async with self._pool.acquire(timeout=30) as connection:
                yield connection
        except AWAY as error:
            raise TierUnavailableError(f"db tier: PostgreSQL does not answer: {error}") from error


async def _in_parts(chunks: AsyncIterator[Bytes]) -> AsyncIterator[bytes]:
    """Chunks of any size as parts of one size; an empty object is one empty part."""
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
