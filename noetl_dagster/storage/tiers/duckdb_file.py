"""Tier ``duckdb``: results in one local DuckDB file, for single-machine work that queries them later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from noetl_dagster.storage.tiers.base import Bytes, TierTooSmallError, TierUnavailableError, WholeValues

T = TypeVar("T")

_LIMIT = 1024**3
_LOCK_SECONDS = 10.0

_CREATE = "CREATE TABLE IF NOT EXISTS result (key VARCHAR PRIMARY KEY, data BLOB NOT NULL)"
_PUT = "INSERT OR REPLACE INTO result VALUES (?, ?)"
_GET = "SELECT data FROM result WHERE key = ?"
_KEYS = "SELECT key FROM result WHERE starts_with(key, ?)"
_DELETE = "DELETE FROM result WHERE key = ?"


class DuckDbTier(WholeValues):
    """Objects as rows of the table ``result``.

    A DuckDB file has one writing process at a time: it is opened for each operation and others wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._turn = asyncio.Lock()

    def uri(self, key: str) -> str:
        return f"duckdb://{self._path.name}/{key}"

    async def ready(self) -> None:
        await self._run(lambda connection: None)

    async def put(self, key: str, data: Bytes) -> str:
        if len(data) > _LIMIT:
            raise TierTooSmallError(
                f"duckdb tier: {len(data)} bytes are more than a value may have ({_LIMIT})"
            )
        await self._run(lambda connection: connection.execute(_PUT, [key, bytes(data)]).fetchall())
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        row = await self._run(lambda connection: connection.execute(_GET, [self._key(uri)]).fetchone())
        if row is None:
            raise KeyError(uri)
        value: bytes = row[0]
        return value

    async def delete(self, uri: str) -> None:
        await self._run(lambda connection: connection.execute(_DELETE, [self._key(uri)]).fetchall())

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        rows = await self._run(lambda connection: connection.execute(_KEYS, [prefix]).fetchall())
        yield [key for (key,) in rows]

    async def close(self) -> None:
        return None

    def _key(self, uri: str) -> str:
        return uri.removeprefix(f"duckdb://{self._path.name}/")

    async def _run(self, action: Callable[[Any], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(self._with_file, action)

    def _with_file(self, action: Callable[[Any], T]) -> T:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                with duckdb.connect(str(self._path)) as connection:
                    connection.execute(_CREATE)
                    return action(connection)
            except duckdb.IOException as error:
                if time.monotonic() > deadline:
                    raise TierUnavailableError(f"duckdb tier: cannot open {self._path}: {error}") from error
                time.sleep(0.02)  # a turn at a file's lock, not a server that is away: no growing pauses
