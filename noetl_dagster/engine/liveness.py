"""Records the executions that a living process drives: shared advisory locks, which end with their process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import asyncpg

from noetl_dagster.events.connection import CONNECTION_LOST, DATABASE_ERRORS, PATIENCE, connect
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.worker.command import own_worker_id

_HOLD = "SELECT pg_advisory_lock_shared(id) FROM unnest($1::bigint[]) AS id"
_RELEASE = "SELECT pg_advisory_unlock_shared(id) FROM unnest($1::bigint[]) AS id"
_RELEASE_ALL = "SELECT pg_advisory_unlock_all()"
_TRY = "SELECT pg_try_advisory_xact_lock($1)"  # released at the end of the statement
_HOLDS = """
SELECT EXISTS (
    SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND datname = current_database()
      AND ((classid::bigint << 32) | objid::bigint) = $1 AND application_name = $2)
"""

_UNDRIVEN = """
SELECT execution_id FROM noetl.execution
WHERE status = 'RUNNING' AND parent_execution_id IS NULL AND execution_id NOT IN (
    SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
ORDER BY execution_id
"""

KEEPALIVE = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""A machine that vanishes closes no connection: PostgreSQL finds out, and frees its locks, in half a minute."""

REOPEN_SECONDS = 0.25
"""Pause between two attempts to reopen a lost connection."""


class Liveness:
    """Holds one lock for each execution that this process drives, on a connection of its own.

    The lock is shared, since several processes may run ops of one execution. A process that gets it exclusively
    knows that no process drives the execution.
    """

    def __init__(self, url: str, pool: asyncpg.Pool) -> None:
        self._url = url
        self._pool = pool
        self._connection: Any = None
        self._held: set[int] = set()
        self._interrupted: set[int] = set()
        self._to_hold: set[int] = set()
        self._to_release: set[int] = set()
        self._listeners: dict[str, Callable[..., None]] = {}
        self._lock = asyncio.Lock()
        self._reopening: asyncio.Task[None] | None = None
        self._closing = False

    async def hold(self, execution_id: int) -> None:
        """Marks the execution as driven by this process until it is released. Reopens a lost connection.

        One statement marks those that arrive while another statement runs.
        """
        if execution_id in self._held and self._is_open:
            return
        self._to_hold.add(execution_id)

        async def hold() -> None:
            async with self._lock:
                await self._connect()
                wanted = (self._to_hold | {execution_id}) - self._held
                self._to_hold.clear()
                if wanted:
                    await self._connection.fetch(_HOLD, list(wanted))
                    self._held |= wanted

        await with_retries(hold, PATIENCE)

    async def release(self, execution_id: int) -> None:
        """Releases an execution that other processes drive from now on, or that has ended."""
        self._to_release.add(execution_id)
        async with self._lock:
            ended = self._to_release & self._held
            self._to_release.clear()
            self._held -= ended
            self._interrupted -= ended
            if ended and self._is_open:
                with suppress(*CONNECTION_LOST):  # a lost session has released them
                    await self._connection.fetch(_RELEASE, list(ended))

    async def release_all(self) -> None:
        """Releases every execution: this process has driven them to their ends, and continues with others."""
        async with self._lock:
            self._held.clear()
            self._interrupted.clear()
            if self._is_open:
                with suppress(*CONNECTION_LOST):
                    await self._connection.execute(_RELEASE_ALL)

    async def listen(self, channel: str, callback: Callable[..., None]) -> None:
        """Calls ``callback`` on notifications, as :meth:`asyncpg.Connection.add_listener` does."""
        async with self._lock:
            await self._connect()
            if self._listeners.get(channel) != callback:
                self._listeners[channel] = callback
                await self._connection.add_listener(channel, callback)

    @property
    def _is_open(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    async def _connect(self) -> None:
        if self._is_open:
            return
        self._interrupted |= self._held
        named = {"application_name": connection_name(own_worker_id()), **KEEPALIVE}
        connection = await connect(self._url, server_settings=named)
        try:
            await connection.fetch(_HOLD, list(self._held))
            for channel, callback in self._listeners.items():
                await connection.add_listener(channel, callback)
        except BaseException:  # without all of its locks it is useless: the next call opens another
            connection.terminate()
            raise
        self._connection = connection
        connection.add_termination_listener(self._on_termination)

    def _on_termination(self, connection: Any) -> None:
        """Reopens a lost connection at once: without its locks, other processes would resume what this one drives."""
        if self._held and not self._closing and connection is self._connection:
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        while self._held and not self._closing:
            try:
                async with self._lock:
                    await self._connect()
                return
            except DATABASE_ERRORS:
                await asyncio.sleep(REOPEN_SECONDS)

    def was_interrupted(self, execution_id: int) -> bool:
        """Reports that the connection was lost since this process began to hold the execution."""
        return execution_id in self._interrupted or (execution_id in self._held and not self._is_open)

    async def has_held(self, execution_ids: Iterable[int]) -> bool:
        """Reports that this process has held these executions without interruption, and holds them now."""
        async with self._lock:
            if self._connection is None or not set(execution_ids) <= self._held - self._interrupted:
                return False
            try:
                await self._connection.execute("SELECT")  # a session that answers has lost none of its locks
            except DATABASE_ERRORS:
                return False
            return True

    async def is_driven(self, execution_id: int) -> bool:
        """Reports that a process, which may be this one, drives the execution now."""
        if execution_id in self._held:
            return True
        return not await self._pool.fetchval(_TRY, execution_id)

    async def undriven(self, connection: Any = None) -> list[int]:
        """Returns the top executions that run according to the projection and that no process drives, oldest first.

        Args:
            connection: reads them; by default any of the pool.
        """
        rows = await (connection or self._pool).fetch(_UNDRIVEN)
        return [row["execution_id"] for row in rows if row["execution_id"] not in self._held]

    async def is_driven_by(self, execution_id: int, worker_id: str) -> bool:
        """Reports that the process of that name lives and drives the execution."""
        return bool(await self._pool.fetchval(_HOLDS, execution_id, connection_name(worker_id)))

    async def close(self) -> None:
        """Closes the connection, which releases its locks."""
        self._closing = True
        if self._reopening is not None:
            await cancel_and_wait(self._reopening)
        if self._is_open:
            await self._connection.close()


def connection_name(worker_id: str) -> str:
    """Returns the name of a process's connection in ``pg_stat_activity``, which allows 63 characters at most."""
    return f"noetl-drive-{hashlib.blake2b(worker_id.encode(), digest_size=12).hexdigest()}"
