"""What is on its way from a visit of a step to those that take its chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class Stream:
    """Chunks between a step and its takers, counted in the process that drives both. The chunks are in the log.

    Args:
        takers: by the name of each step that takes them, how many chunks may wait for it or be worked on by it.
    """

    def __init__(self, takers: Mapping[str, int]) -> None:
        self.has_ended = False
        self.has_failed = False
        self.is_taken = False
        self.told = 0
        self._ahead: set[int] = set()
        self._room = dict(takers)
        self._taken = dict.fromkeys(takers, 0)
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether every taker has room for one more chunk; nobody waits for takers that have not begun."""
        return not self.is_taken or all(
            self.told - taken < self._room[taker] for taker, taken in self._taken.items()
        )

    def tell(self, number: int) -> None:
        """A chunk is in the log. ``told`` counts them from the first without a gap."""
        if number >= self.told:
            self._ahead.add(number)
        while self.told in self._ahead:
            self._ahead.remove(self.told)
            self.told += 1
        self._wake()

    def begin(self) -> None:
        """The takers begin: from now on they are waited for."""
        self.is_taken = True

    def take(self, taker: str, count: int) -> None:
        """A taker is done with so many chunks, from the first without a gap."""
        if taker in self._taken:
            self._taken[taker] = count
            self._wake()

    def leave(self, taker: str) -> None:
        """A taker takes no more: nobody waits for it."""
        self._taken.pop(taker, None)
        self._wake()

    def end(self, *, failed: bool) -> None:
        """There will be no further chunks; after a failure some may be missing."""
        self.has_ended, self.has_failed = True, failed
        self._wake()

    async def changed(self) -> None:
        """Waits until something of this is another one."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
