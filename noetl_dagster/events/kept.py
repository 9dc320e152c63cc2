"""A connection at hand for statements that follow each other closely."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

IDLE_SECONDS = 0.01


class KeptConnection:
    """Runs small statements, one at a time, on a connection that stays out of the pool between them.

    Taking a connection from asyncpg's pool and giving it back costs a task and several turns of the event
    loop: a fifth of the time of a single insert. The connection goes back by itself once nobody has used it
    for :data:`IDLE_SECONDS`, so there is nothing to close, and the pool misses it only while it works.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._connection: Any = None
        self._busy = False
        self._used = 0.0
        self._returning: asyncio.Task[None] | None = None

    async def fetchval(self, query: str, *values: Any) -> Any:
        """The first value that a statement gives; from the pool's own connections while this one is busy."""
        if self._busy:
            return await self._pool.fetchval(query, *values)
        self._busy = True
        try:
            if self._connection is None:
                self._connection = await self._pool.acquire()
                self._look_later()
            return await self._connection.fetchval(query, *values)
        finally:
            self._busy = False
            self._used = asyncio.get_running_loop().time()
            if self._connection is not None and self._connection.is_closed():
                self._give_back()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self._connection is None:
            return
        if self._busy or asyncio.get_running_loop().time() - self._used < IDLE_SECONDS:
            self._look_later()
        else:
            self._give_back()

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        self._returning = asyncio.get_running_loop().create_task(self._pool.release(connection))
