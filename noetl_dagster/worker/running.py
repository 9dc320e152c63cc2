"""Running commands: their heartbeats, and the removal of what their tools leave outside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.connection import DATABASE_AWAY, DATABASE_ERRORS
from noetl_dagster.events.queries import COMMAND_OVER
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.tools.base import Removal, ToolCall
from noetl_dagster.tools.commands import jobs
from noetl_dagster.worker.command import Command, CommandEvents

LONGEST_NOTE = 300
"""Characters of a progress note, at most."""

LOOK_SECONDS = 0.1
ARRIVAL_SECONDS = 30.0
"""Wait for the end of a command that was sent over NATS."""

ORPHANS_SECONDS = 120.0

LATER = RetryLimits((ToolError,), seconds=3600.0, longest_pause=15.0)
"""For leftovers whose server does not answer; the maintenance looks for what is left then."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _RunningCommand:
    """A command that runs until the block ends.

    Attributes:
        due: the time of its next heartbeat.
        written: the note of the last one.
        others: all running commands, by their ids.
    """

    command: Command
    due: float
    others: dict[str, _RunningCommand]
    note: str = ""
    written: str = ""

    def __enter__(self) -> None:
        self.others[self.command.command_id] = self

    def __exit__(self, *exc: object) -> None:
        if self.others.get(self.command.command_id) is self:  # not that of a later claim of the same command
            del self.others[self.command.command_id]


class Heartbeats:
    """Writes ``command.heartbeat`` for every command that has run for longer than the interval.

    A command that ends sooner writes none, unless its tool has reported progress: that is written within a third of
    the interval.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, interval: float) -> None:
        self._buffer = buffer
        self._events = events
        self._interval = interval
        self._running: dict[str, _RunningCommand] = {}
        self._task: asyncio.Task[None] | None = None

    def beating(self, command: Command) -> AbstractContextManager[None]:
        """Writes heartbeats until the block ends."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._beat())
        return _RunningCommand(command, loop.time() + self._interval, self._running)

    def tell(self, call: ToolCall, message: str) -> None:
        """Stores a call's progress for the next heartbeat of its command."""
        running = self._running.get(call.command_id)
        if running is not None:
            running.note = SECRETS.redact(message)[:LONGEST_NOTE]

    async def close(self) -> None:
        """Stops the heartbeats."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            await asyncio.sleep(self._interval / 3)
            now = loop.time()
            due = [one for one in self._running.values() if one.due <= now or one.note != one.written]
            for one in due:
                one.due, one.written = now + self._interval, one.note
            if due:
                await self._buffer.post([self._events.heartbeat(one.command, one.written) for one in due])


class ExternalCleanup:
    """External leftovers of the commands that run in this process. False while there are none."""

    def __init__(self, buffer: EventBuffer, pool: asyncpg.Pool) -> None:
        self._buffer = buffer
        self._pool = pool
        self._kept: dict[str, list[Removal]] = {}
        self._later: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, call: ToolCall, removal: Removal) -> None:
        """Registers the removal of a call's leftovers, until its command has ended."""
        self._kept.setdefault(call.owner or call.command_id, []).append(removal)

    async def is_over(self, call: ToolCall) -> bool:
        """Reports that another process has ended the call's command, so that the call need not continue."""
        return await self._has_ended(call.execution_id, call.owner or call.command_id)

    async def ended(self, command: Command) -> None:
        """Removes a command's leftovers once its end is in the log, whichever process wrote it."""
        if removals := self._kept.pop(command.command_id, None):
            await self._buffer.flush(command.execution_id)
            await asyncio.shield(self._remove_if_ended(command, removals, ARRIVAL_SECONDS))

    async def interrupted(self, command: Command, error: BaseException) -> None:
        """Does as :meth:`ended`, unless the log has no end of the command: then another process continues it."""
        removals = self._kept.pop(command.command_id, None)
        if removals and isinstance(error, asyncio.CancelledError):
            await asyncio.shield(self._remove_if_ended(command, removals, 0.0))

    async def _remove_if_ended(self, command: Command, removals: Sequence[Removal], seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not await self._has_ended(command.execution_id, command.command_id):
            if clock() >= until:
                return
            await asyncio.sleep(LOOK_SECONDS)
        for removal in removals:
            work = partial(self._remove, command, removal)
            try:
                await work()
            except ToolError as error:
                logger.warning("what command %s left cannot be removed now: %s", command.command_id, error)
                task = asyncio.create_task(self._remove_later(command, work))
                self._later.add(task)
                task.add_done_callback(self._later.discard)

    async def _remove(self, command: Command, removal: Removal) -> None:
        """Removes something; raises ``ToolError`` if that may succeed later."""
        try:
            await removal()
        except ToolError as error:
            if error.retryable:
                raise
            logger.warning("what command %s left is there until the maintenance: %s", command.command_id, error)

    async def _remove_later(self, command: Command, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await with_retries(work, LATER)
        except ToolError:
            logger.warning("what command %s left is there until the maintenance", command.command_id)

    async def close(self) -> None:
        """Stops to remove what could not be removed so far."""
        if self._later:
            logger.warning("leftovers of %d calls are there until the maintenance", len(self._later))
            await cancel_and_wait(*self._later)

    async def _has_ended(self, execution_id: int, command_id: str) -> bool:
        try:
            return bool(await self._pool.fetchval(COMMAND_OVER, execution_id, command_id))
        except DATABASE_ERRORS as error:
            logger.warning("cannot look for the end of command %s: %s", command_id, error)
            return False


async def remove_orphans(pool: asyncpg.Pool, executions: Collection[int] | None = None) -> int:
    """Removes leftovers of ended commands whose processes are gone (of these ``executions``); returns their number.

    Leftovers that cannot be removed now stay for another time, with a warning.
    """

    async def is_over(execution: int, command: str) -> bool:
        return bool(await pool.fetchval(COMMAND_OVER, execution, command))

    try:
        async with asyncio.timeout(ORPHANS_SECONDS):
            return await jobs.remove_orphans(is_over, executions)
    except (TimeoutError, *DATABASE_AWAY) as error:
        logger.warning("jobs of containers are left to the next maintenance: %r", error)
        return 0
