"""Waits for the ends of commands that workers run, notified by PostgreSQL's NOTIFY."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import asyncpg
import orjson

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport.handler import ENDS_CHANNEL
from noetl_dagster.events.transport.queries import COMMAND_ENDS
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.worker.command import Outcome

logger = logging.getLogger(__name__)

PATIENCE = RetryLimits(DATABASE_AWAY)
"""Commands that workers run outlive any outage of the database, so their driver waits for it without end."""


class CommandEnds:
    """Futures of commands, done as soon as the log has their ends.

    PostgreSQL notifies of ends. Notifications are lost while the connection that listens is broken, so the sweep of the
    dispatcher looks up commands that have left the queue. If the log refuses the look for another reason than an
    outage, whoever waits gets that error.
    """

    def __init__(self, pool: asyncpg.Pool, liveness: Liveness) -> None:
        self._pool = pool
        self._liveness = liveness
        self._waiting: dict[str, tuple[int, asyncio.Future[Outcome]]] = {}
        self._ended: set[str] = set()
        self._to_check = asyncio.Event()
        self._delivering: asyncio.Task[None] | None = None

    @property
    def executions(self) -> list[int]:
        """Executions with awaited commands."""
        return list({execution_id for execution_id, _ in self._waiting.values()})

    async def open(self) -> None:
        """Starts to listen, and returns when it does."""
        await with_retries(partial(self._liveness.listen, ENDS_CHANNEL, self._notified), PATIENCE)
        self._delivering = asyncio.create_task(self._deliver())

    async def close(self) -> None:
        """Delivers nothing more."""
        if self._delivering is not None:
            await cancel_and_wait(self._delivering)

    def expect(self, execution_id: int, command_id: str) -> asyncio.Future[Outcome]:
        """Returns a future for the outcome of a command; it is forgotten when it is done or cancelled."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = (execution_id, future)
        future.add_done_callback(lambda _: self._waiting.pop(command_id, None))
        return future

    def check(self, command_ids: Iterable[str]) -> None:
        """Looks up soon whether these commands have ended."""
        self._ended.update(name for name in command_ids if name in self._waiting)
        if self._ended:
            self._to_check.set()

    def _notified(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        self.check(orjson.loads(payload))

    async def _deliver(self) -> None:
        """Delivers without end; an unexpected error goes to all who wait."""
        while True:
            await self._to_check.wait()
            self._to_check.clear()
            try:
                await self._deliver_ended()
            except Exception as error:
                logger.exception("the ends of commands cannot be read")
                for _, future in [*self._waiting.values()]:
                    if not future.done():
                        future.set_exception(error)

    async def _deliver_ended(self) -> None:
        asked = [name for name in self._ended if name in self._waiting]
        self._ended.clear()
        executions = [self._waiting[name][0] for name in asked]
        rows = await with_retries(
            partial(self._pool.fetch, COMMAND_ENDS, executions, asked), PATIENCE, on_failure=_note_delay
        )
        for row in rows:
            waiting = self._waiting.get(row["command_id"])
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(_outcome(row))


def _note_delay(error: BaseException, pause: float) -> None:
    logger.warning("the ends of commands cannot be read: %s; trying again in %.2g s", error, pause)


def _outcome(row: Any) -> Outcome:
    """Returns how a command ended; an unreadable end is a failure that reports this."""
    try:
        outcome = Outcome.of(row)
        outcome.duration = row["duration"] or 0.0
        return outcome
    except Exception as error:
        logger.exception("the end of command %s cannot be read", row["command_id"])
        message = f"the end of command {row['command_id']} cannot be read: {error!r}; look at the worker that sent it"
        return Outcome(error_envelope(ToolError(message, kind="worker", code="END_UNREADABLE")))
