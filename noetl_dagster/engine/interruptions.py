"""Stops work on an execution that was cancelled, or taken over by a later epoch.

A process that drives an execution stops in both cases. A command that a worker of the pool has claimed stops only at a
cancellation: the process that resumes the execution finds the command claimed and waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import asyncpg

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.errors import ExecutionCancelledError, ExecutionStateError, NoetlError
from noetl_dagster.events.connection import DATABASE_AWAY, PATIENCE
from noetl_dagster.events.queries import INTERRUPTIONS
from noetl_dagster.events.types import EventType
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.logs import without_fields
from noetl_dagster.process.retrying import with_retries

logger = logging.getLogger(__name__)

CHANNEL = "noetl_execution"
"""PostgreSQL channel of interruptions; the payload is the execution id."""

NOTIFY = "SELECT pg_notify($1, $2)"

POLL_SECONDS = 2.0
"""The log is read at this interval even without notifications: connections break, poolers drop LISTEN."""

REMEMBERED = 1_000
"""Number of interrupted executions that are remembered for work that has not begun yet."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Guarded:
    execution_id: int
    epoch: int | None
    task: asyncio.Task[Any]
    reason: NoetlError | None = None


class InterruptionWatch:
    """Guards the work of this process: cancels running tools as soon as the execution is cancelled."""

    def __init__(self, pool: asyncpg.Pool, liveness: Liveness) -> None:
        self._pool = pool
        self._liveness = liveness
        self._guarded: set[_Guarded] = set()
        self._interrupted: OrderedDict[int, None] = OrderedDict()
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listens from now on, so that work that begins can be stopped."""
        await self._liveness.listen(CHANNEL, self._notified)

    async def guard(self, execution_id: int, work: Coroutine[Any, Any, T], *, epoch: int | None = None) -> T:
        """Awaits ``work`` on an execution, which drives an ``epoch``; None for a single command, whatever the epoch.

        Raises:
            ExecutionCancelledError: the execution was cancelled; the work was cancelled with it.
            ExecutionStateError: a later epoch has taken the execution over.
        """
        if epoch is None and execution_id in self._interrupted:  # possibly since the command was claimed
            await self._refuse(execution_id, work)
        task = asyncio.create_task(work)
        guarded = _Guarded(execution_id, epoch, task)
        self._guarded.add(guarded)
        try:
            if epoch is not None:
                await with_retries(partial(self._look, [execution_id]), PATIENCE)
            if self._poller is None or self._poller.done():
                if epoch is None:  # its execution was open when the command was claimed: work does not wait
                    self._changed.set()
                self._poller = asyncio.create_task(self._poll(), context=without_fields())
            return await task
        except asyncio.CancelledError:
            if guarded.reason is not None:
                raise guarded.reason from None
            raise
        finally:
            self._guarded.discard(guarded)
            if not task.done():
                await cancel_and_wait(task)

    async def close(self) -> None:
        """Stops the polling."""
        if self._poller is not None:
            await cancel_and_wait(self._poller)

    async def _refuse(self, execution_id: int, work: Coroutine[Any, Any, T]) -> None:
        """Refuses to begin work on a cancelled execution."""
        try:
            rows = await self._pool.fetch(INTERRUPTIONS, [execution_id])
        except DATABASE_AWAY as error:
            logger.warning("cannot look for cancellations just now: %s", error)
            return
        for row in rows:
            if (reason := _interruption(execution_id, None, row)) is not None:
                work.close()
                raise reason

    def _notified(self, connection: Any, pid: int, channel: str, payload: object) -> None:
        execution_id = str(payload)
        if execution_id.isdecimal():
            self._interrupted[int(execution_id)] = None
        while len(self._interrupted) > REMEMBERED:
            self._interrupted.popitem(last=False)
        if any(str(guarded.execution_id) == payload for guarded in self._guarded):
            self._changed.set()

    async def _poll(self) -> None:
        """Polls the log; reopens a connection that was lost meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            if not self._guarded:
                return
            self._changed.clear()
            try:
                await self._look([guarded.execution_id for guarded in self._guarded])
            except DATABASE_AWAY as error:
                logger.warning("cannot look for cancellations just now: %s", error)
            except Exception:  # a defect must not end the polling
                logger.exception("cannot look for cancellations")

    async def _look(self, execution_ids: list[int]) -> None:
        """Looks for events that stop work, once they are listened for."""
        await self.open()
        for row in await self._pool.fetch(INTERRUPTIONS, execution_ids):
            for guarded in self._guarded:
                if guarded.execution_id == row["execution_id"] and guarded.reason is None:
                    guarded.reason = _interruption(guarded.execution_id, guarded.epoch, row)
                    if guarded.reason is not None:
                        guarded.task.cancel()


def _interruption(execution_id: int, epoch: int | None, row: Any) -> NoetlError | None:
    """Returns the reason why work of an epoch must stop, or None when the event does not concern it."""
    if row["event_type"] == EventType.EXECUTION_CANCELLED:
        return ExecutionCancelledError(f"execution {execution_id} was cancelled: {row['error']}")
    if epoch is not None and row["epoch"] > epoch:
        return ExecutionStateError(
            f"execution {execution_id} was resumed elsewhere as epoch {row['epoch']}; "
            f"this process drove epoch {epoch} and stops"
        )
    return None
