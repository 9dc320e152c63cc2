"""Runs commands in the pool of workers, for the op that waits for their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.process.logs import without_fields
from noetl_dagster.worker.command import Outcome
from noetl_dagster.worker.runner import Call

if TYPE_CHECKING:
    from noetl_dagster.engine.pool.connection import PoolConnection


class Dispatcher:
    """Runs commands in the pool. Connects on first use, since most executions do not need NATS; one per process.

    Args:
        runtime: returns the runtime of the process, which has this dispatcher.
        liveness: whose connection listens for the ends of commands.
    """

    def __init__(self, runtime: Callable[[], Runtime], liveness: Liveness) -> None:
        self._runtime = runtime
        self._liveness = liveness
        self._opening = asyncio.Lock()
        self._connection: PoolConnection | None = None

    async def run(self, call: Call) -> Outcome:
        """Queues an issued command for a worker and waits for its end.

        If the wait is cancelled, the command leaves the queue again, unless a worker has claimed it.
        """
        async with self._opening:
            if self._connection is None:
                opening = self._open()
                self._connection = await asyncio.create_task(opening, context=without_fields())
        return await self._connection.run(call)

    def unattended(self, execution_id: int, step: str) -> str | None:
        """Returns a message if commands of a step wait for a pool without workers, else None."""
        return None if self._connection is None else self._connection.unattended(execution_id, step)

    async def close(self) -> None:
        """Closes the connections, if it has opened any."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _open(self) -> PoolConnection:
        from noetl_dagster.engine.pool.connection import PoolConnection
        from noetl_dagster.events.transport.nats import connect

        runtime = self._runtime()
        connection = PoolConnection(runtime, self._liveness, await connect(runtime.settings, "dispatch"))
        await connection.open()
        return connection
