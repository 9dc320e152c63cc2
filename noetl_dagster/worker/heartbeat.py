"""Heartbeats of the commands that run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.worker.command import Command, CommandEvents

LONGEST_NOTE = 300
"""Characters of what a tool tells of its progress."""


@dataclass(slots=True)
class _Running:
    """A command that runs. ``due``: when its next heartbeat is; ``said``: the note of the last one."""

    command: Command
    due: float
    note: str = ""
    said: str = ""


class Heartbeats:
    """Writes ``command.heartbeat`` for every command that has run for longer than the interval.

    A command that ends sooner never writes one, unless its tool has told how far it is: that is written
    within a third of the interval.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, interval: float) -> None:
        self._buffer = buffer
        self._events = events
        self._interval = interval
        self._running: dict[str, _Running] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """Commands that run now."""
        return len(self._running)

    @contextmanager
    def beating(self, command: Command) -> Iterator[None]:
        """Heartbeats go on until the block ends."""
        loop = asyncio.get_running_loop()
        key = command.command_id
        self._running[key] = _Running(command, loop.time() + self._interval)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._beat())
        try:
            yield
        finally:
            self._running.pop(key, None)

    def tell(self, call: ToolCall, message: str) -> None:
        """Keeps how far a call is, for the next heartbeat of its command."""
        running = self._running.get(call.command_id)
        if running is not None:
            running.note = message[:LONGEST_NOTE]

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            await asyncio.sleep(self._interval / 3)
            now = loop.time()
            due = [one for one in self._running.values() if one.due <= now or one.note != one.said]
            for one in due:
                one.due, one.said = now + self._interval, one.note
            if due:
                await self._buffer.post([self._events.heartbeat(one.command, one.said) for one in due])
