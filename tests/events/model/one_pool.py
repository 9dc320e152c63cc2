"""A pool of one connection: what the code of the product does on it can be undone, or stopped before each statement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

Pause = Callable[[str], Awaitable[None]]


class OnePool:
    """A pool of one connection, whose transactions are savepoints of one that the test opened.

    Args:
        pause: awaited before each statement, with its text.
    """

    def __init__(self, connection: Any, pause: Pause | None = None) -> None:
        self.connection = connection
        self._pause = pause

    async def _run(self, method: str, *values: Any, **named: Any) -> Any:
        if self._pause is not None:
            await self._pause(str(values[0]))
        return await getattr(self.connection, method)(*values, **named)

    async def fetch(self, *values: Any) -> Any:
        """Runs a statement, like the following ones."""
        return await self._run("fetch", *values)

    async def fetchrow(self, *values: Any) -> Any:
        return await self._run("fetchrow", *values)

    async def fetchval(self, *values: Any) -> Any:
        return await self._run("fetchval", *values)

    async def execute(self, *values: Any) -> Any:
        return await self._run("execute", *values)

    async def copy_records_to_table(self, *values: Any, **named: Any) -> Any:
        return await self._run("copy_records_to_table", *values, **named)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Opens a transaction, or a savepoint of the one that is open; pauses before the commit."""
        is_outer = not self.connection.is_in_transaction()
        async with self.connection.transaction():
            yield
            if is_outer and self._pause is not None:
                await self._pause("COMMIT")

    def is_closed(self) -> bool:
        """Returns whether the connection is closed."""
        return bool(self.connection.is_closed())

    def acquire(self) -> _Acquired:
        """Returns this pool as its connection."""
        return _Acquired(self)

    async def release(self, connection: Any) -> None:
        """Does nothing."""


class _Acquired:
    def __init__(self, pool: OnePool) -> None:
        self._pool = pool

    def __await__(self) -> Generator[Any, None, OnePool]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> OnePool:
        return self._pool

    async def __aexit__(self, *exc: object) -> None:
        pass


@asynccontextmanager
async def undone(pool: OnePool) -> AsyncIterator[None]:
    """Undoes what the block does."""
    await pool.connection.execute("SAVEPOINT here")
    try:
        yield
    finally:
        await pool.connection.execute("ROLLBACK TO SAVEPOINT here; RELEASE SAVEPOINT here")
