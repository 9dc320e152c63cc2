"""Frames of cursor loops in the log's database: which rows a loop has claimed, and whose turn it is to end them.

A frame is written before its claim commits and goes when all its rows have ended, so that rows of a driver that died
are known. Its lease says how long the driver may be silent before the rows are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from noetl_dagster.engine.loops.issue import Activation
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import FrameSpec

LEASE_SECONDS = 300.0
"""How long the driver of a frame may be silent, where the playbook does not say."""

BEATS_A_LEASE = 3

KEEP = """
INSERT INTO noetl.cursor_frame
    (execution_id, loop_id, first_index, step, visit, rows, by_row, lease_until, claim_xid)
VALUES ($1, $2, $3, $4, $5, $6, $7, now() + make_interval(secs => $8), $9)
"""
FORGET = "DELETE FROM noetl.cursor_frame WHERE execution_id = $1 AND loop_id = $2 AND first_index = $3"

# A lease that has run out stays so: its rows are being given back.
BEAT = """
UPDATE noetl.cursor_frame SET lease_until = now() + make_interval(secs => $3)
WHERE execution_id = $1 AND loop_id = $2 AND lease_until > now()
"""


class Frames:
    """The frames of one activation of a cursor loop."""

    def __init__(self, runtime: Runtime, activation: Activation, frame: FrameSpec) -> None:
        self._runtime = runtime
        self._activation = activation
        self._lease = frame.lease_seconds or LEASE_SECONDS
        # twice a lease at least, whatever the playbook says: one heartbeat may be late
        self._pause = min(frame.heartbeat_seconds or self._lease / BEATS_A_LEASE, self._lease / 2)

    async def keep(
        self, rows: list[Any], first_index: int, claim_xid: int, events: Sequence[Event], *, by_row: bool
    ) -> None:
        """Writes a frame together with the events that issue its commands.

        Raises:
            ExecutionCancelledError: the execution was cancelled; nothing was written.
        """
        runtime, activation = self._runtime, self._activation
        async with runtime.pool.acquire() as connection, connection.transaction():
            await runtime.log.append(events, connection=connection)
            await connection.execute(
                KEEP,
                activation.execution.id,
                activation.loop_id,
                first_index,
                activation.step,
                activation.visit,
                rows,
                by_row,
                self._lease,
                claim_xid,
            )

    async def forget(self, first_index: int) -> None:
        """Ends a frame all of whose rows have ended. Their ends are in the log before."""
        await self._runtime.buffer.flush()
        activation = self._activation
        await self._runtime.pool.execute(FORGET, activation.execution.id, activation.loop_id, first_index)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Keeps the leases of all frames while the block runs."""
        beats = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            with contextlib.suppress(*DATABASE_AWAY):
                await self._runtime.pool.execute(
                    BEAT, self._activation.execution.id, self._activation.loop_id, self._lease
                )
