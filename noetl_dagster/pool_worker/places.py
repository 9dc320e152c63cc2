"""The places that a worker has for commands: so many at once, and fewer of some tool kinds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence


class Places:
    """Counts what runs in them.

    Args:
        slots: commands at once.
        limits: commands at once by tool kind, where a kind has fewer than there are slots.
    """

    def __init__(self, slots: int, limits: Mapping[str, int]) -> None:
        self._slots = slots
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """What goes on until it is closed."""
        return self._tasks

    @property
    def active(self) -> int:
        """Commands that run now."""
        return self._running.total()

    @property
    def free(self) -> int:
        """Further commands that may run now; below zero while some wait for others to end."""
        return self._slots - self.active

    def room(self, tool_kind: str) -> int:
        """Further commands of a tool kind that may run now."""
        return self.free if tool_kind not in self._limits else min(self.free, self._left(tool_kind))

    async def idle(self) -> None:
        """Waits until nothing runs."""
        while self.active:
            self._freed.clear()
            await self._freed.wait()

    def _left(self, tool_kind: str) -> int:
        """Places that are left of those that a kind with a limit has."""
        return max(self._limits[tool_kind] - self._running[tool_kind], 0)

    def _begin(self, tool_kind: str) -> None:
        self._running[tool_kind] += 1

    def _end(self, tool_kind: str) -> None:
        self._running[tool_kind] -= 1
        self._freed.set()
