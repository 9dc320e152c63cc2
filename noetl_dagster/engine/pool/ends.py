"""Waits for the ends of commands that workers run, notified by PostgreSQL's NOTIFY."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import DATABASE_AWAY, connect
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport.handler import ENDS_CHANNEL
from noetl_dagster.events.transport.queries import COMMAND_ENDS
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.worker.command import Outcome

logger = logging.getLogger(__name__)

PATIENCE = RetryLimits(DATABASE_AWAY)
"""Commands that workers run outlive any outage of the database, so their driver waits for it without end."""

PAUSE_SECONDS = 1.0
"""Pause after an unexpected error."""


class CommandEnds:
    """Futures of commands, done as soon as the log has their ends.

    One connection listens. Notifications are lost while it is broken, so after each (re)connection it looks up every
    awaited command in the log; it never polls otherwise. If the log refuses the look for another reason than an
    outage, whoever waits gets that error.
    """

    def __init__(self, pool: asyncpg.Pool, url: str) -> None:
        self._pool = pool
        self._url = url
        self._waiting: dict[str, tuple[int, asyncio.Future[Outcome]]] = {}
        self._ended: set[str] = set()
        self._to_check = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._listening = asyncio.Event()

    @property
    def executions(self) -> list[int]:
        """Executions with awaited commands."""
        return list({execution_id for execution_id, _ in self._waiting.values()})

    async def open(self) -> None:
        """Starts to listen, and returns when it does."""
        self._tasks = [asyncio.create_task(self._keep(work)) for work in (self._listen, self._deliver)]
        await self._listening.wait()

    async def close(self) -> None:
        """Stops listening."""
        await cancel_and_wait(*self._tasks)

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

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Works without end; an unexpected error goes to all who wait."""
        while True:
            try:
                await work()
            except Exception as error:
                logger.exception("the ends of commands cannot be read")
                self._listening.set()
                for _, future in [*self._waiting.values()]:
                    if not future.done():
                        future.set_exception(error)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _listen(self) -> None:
        while True:
            connection = await with_retries(
                lambda: connect(self._url), PATIENCE, on_failure=partial(_note_delay, "listen for")
            )
            broken = asyncio.Event()
            connection.add_termination_listener(lambda _, broken=broken: broken.set())
            try:
                await connection.add_listener(ENDS_CHANNEL, self._notified)
                self.check(list(self._waiting))
                self._listening.set()
                await broken.wait()
            except DATABASE_AWAY as error:
                logger.warning("the listening connection broke: %s", error)
            finally:
                connection.terminate()

    def _notified(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        self.check(orjson.loads(payload))

    async def _deliver(self) -> None:
        while True:
            await self._to_check.wait()
            self._to_check.clear()
            asked = [name for name in self._ended if name in self._waiting]
            self._ended.clear()
            executions = [self._waiting[name][0] for name in asked]
            rows = await with_retries(
                partial(self._pool.fetch, COMMAND_ENDS, executions, asked),
                PATIENCE,
                on_failure=partial(_note_delay, "read"),
            )
            for row in rows:
                waiting = self._waiting.get(row["command_id"])
                if waiting is not None and not waiting[1].done():
                    waiting[1].set_result(_outcome(row))


def _note_delay(do: str, error: BaseException, pause: float) -> None:
    logger.warning("cannot %s the ends of commands: %s; trying again in %.2g s", do, error, pause)


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
