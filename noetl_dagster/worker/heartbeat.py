"""Heartbeats of the commands that run in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.worker.command import Command, CommandEvents


class Heartbeats:
    """Writes ``command.heartbeat`` for every command that has run for longer than the interval.

    A command that ends sooner never writes one.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, interval: float) -> None:
        self._buffer = buffer
        self._events = events
        self._interval = interval
        self._running: dict[str, tuple[Command, float]] = {}
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
        self._running[key] = (command, loop.time() + self._interval)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._beat())
        try:
            yield
        finally:
            self._running.pop(key, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            await asyncio.sleep(self._interval / 3)
            now = loop.time()
            due = [command for command, at in self._running.values() if at <= now]
            for command in due:
                self._running[command.command_id] = (command, now + self._interval)
            if due:
                await self._buffer.post([self._events.heartbeat(command) for command in due])
