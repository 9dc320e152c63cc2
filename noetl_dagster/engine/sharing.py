"""A range of a loop's items, shared between the process that drives the loop and its helper processes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Protocol

Message = dict[str, Any]
"""A message between the driver and a helper process; ``do`` is its kind."""

Work = Callable[[], Coroutine[Any, Any, None]]

LARGEST = 500
"""Items of one range, at most."""

CANCEL_SECONDS = 30.0
"""A helper process that does not end cancelled work within this time is killed."""

CANCELLED = "cancelled"
"""Error that a helper process reports for cancelled work."""

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Range:
    """Items ``start <= index < stop``. ``again``: a helper process that is gone had them, and may have ended some."""

    start: int
    stop: int
    again: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


class Ranges:
    """Hands out items in order, in ranges that get smaller so that all processes end at about the same time."""

    def __init__(self, start: int, stop: int) -> None:
        self._left: deque[Range] = deque([Range(start, stop)] if stop > start else [])

    def __len__(self) -> int:
        return sum(map(len, self._left))

    def take(self, sharers: int) -> Range | None:
        """Returns the next range for one of ``sharers`` processes, or None when nothing is left."""
        if not self._left:
            return None
        size = LARGEST if sharers == 1 else min(LARGEST, max(1, len(self) // (2 * sharers)))
        first = self._left.popleft()
        if len(first) > size:
            self._left.appendleft(Range(first.start + size, first.stop, first.again))
            first = Range(first.start, first.start + size, first.again)
        return first

    def give_back(self, ranges: list[Range]) -> None:
        """Returns the ranges of a process that is gone."""
        self._left.extend(Range(one.start, one.stop, again=True) for one in ranges)

    def clear(self) -> None:
        """Drops everything that is left."""
        self._left.clear()


@dataclass(frozen=True, slots=True)
class SharedLoop:
    """The activation of a loop whose items are shared. ``tool_kinds``: whose modules a helper process needs."""

    execution_id: int
    step: str
    visit: int
    loop_id: str
    shard: bool
    tool_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of items that succeeded and failed."""

    done: int = 0
    failed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.done + other.done, self.failed + other.failed)


class ItemSource(Protocol):
    """The items that one process takes from a shared range."""

    async def take(self) -> Range | None:
        """Returns the next items for this process, or None when nothing is left."""
        ...

    def must_end(self) -> bool:
        """Reports between two items that a coroutine of this process ends, since another process gets its slot."""
        ...

    async def run(self, work: Work) -> Tally:
        """Runs as many copies of ``work`` as this process has slots, and waits for the other processes.

        Returns:
            The counts of the other processes.
        """
        ...

    def stop(self) -> None:
        """Hands out no more items, to any process."""
        ...


class HelperPeer(Protocol):
    """A helper process as :class:`SharedItems` uses it."""

    def send(self, message: Message) -> None:
        """Sends without waiting."""
        ...

    def kill(self) -> None:
        """Ends the process at once."""
        ...


@dataclass(slots=True)
class _Assignment:
    """The slots of a helper process, those that it is still to get, and the ranges that it took."""

    slots: int = 0
    wanted: int = 0
    taken: list[Range] = field(default_factory=list)


class SharedItems:
    """The driver's item source, which also accounts for the helper processes.

    The slots that the loop allows are spread over the processes. A helper process that comes later gets slots of the
    driver as the driver's coroutines end an item. The slots of a helper process that is gone come back.

    Args:
        slots: commands that run at the same time, in all processes together.
        processes: that may work on the range; for fewer of them the ranges are larger.
    """

    def __init__(self, loop: SharedLoop, start: int, stop: int, slots: int, processes: int = 1) -> None:
        self.number = next(_numbers)
        self.loop = loop
        self._ranges = Ranges(start, stop)
        self._slots = slots
        self._processes = processes
        self._helpers: dict[HelperPeer, _Assignment] = {}
        self._tally = Tally()
        self._spare = 0
        self._stopped = False
        self._changed = asyncio.Event()

    # -- the driver's items --------------------------------------------------------------------------

    async def take(self) -> Range | None:
        """Returns the next items for the driver."""
        return self._ranges.take(self._processes)

    def must_end(self) -> bool:
        """Passes a slot of the driver to a helper process that waits for one."""
        if self._stopped:
            return True
        if self._ranges:
            for helper, assigned in self._helpers.items():
                if assigned.wanted:
                    self._give_slots(helper, assigned, 1)
                    return True
        return False

    async def run(self, work: Work) -> Tally:
        """Runs the driver's copies of ``work`` until all processes have ended; see :class:`ItemSource`."""
        tasks: set[asyncio.Task[None]] = set()
        self._spare = self._slots - sum(assigned.slots for assigned in self._helpers.values())
        try:
            while self._spare or tasks or self._helpers:
                tasks |= {asyncio.create_task(work()) for _ in range(self._spare)}
                self._spare = 0
                self._changed.clear()
                if not tasks:
                    self._dismiss_unused()
                await self._wait_for_end_of_one(tasks)
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    task.result()
            return self._tally
        except BaseException:
            self._send_all("cancel")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wait_for_helpers()

    async def _wait_for_end_of_one(self, tasks: set[asyncio.Task[None]]) -> None:
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({*tasks, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _wait_for_helpers(self) -> None:
        """Returns when no helper process works on this range; kills those that take too long."""
        deadline = asyncio.get_running_loop().time() + CANCEL_SECONDS
        while self._helpers:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                for helper in self._helpers:
                    helper.kill()
                deadline += CANCEL_SECONDS

    def _dismiss_unused(self) -> None:
        """Ends the waiting of helper processes for which no slot has become free."""
        for helper, assigned in self._helpers.items():
            if not assigned.slots:
                helper.send({"do": "over", "range": self.number})

    def stop(self) -> None:
        """Hands out no more items, to any process."""
        if not self._stopped:
            self._stopped = True
            self._ranges.clear()
            self._send_all("stop")

    def _send_all(self, kind: str) -> None:
        for helper in self._helpers:
            helper.send({"do": kind, "range": self.number})

    # -- the helper processes' -----------------------------------------------------------------------

    def add_helper(self, helper: HelperPeer, processes: int, *, at_once: bool) -> None:
        """Lets a helper process work on the range, as one of ``processes``.

        Args:
            at_once: the driver has not begun yet, so the slots are free.
        """
        wanted = self._slots // processes
        if not wanted or not self._ranges or helper in self._helpers or len(self._helpers) >= processes - 1:
            return
        assigned = self._helpers[helper] = _Assignment(wanted=wanted)
        helper.send({"do": "open", "range": self.number, "loop": asdict(self.loop)})
        if at_once:
            self._give_slots(helper, assigned, wanted)

    def _give_slots(self, helper: HelperPeer, assigned: _Assignment, number: int) -> None:
        assigned.wanted -= number
        assigned.slots += number
        helper.send({"do": "work", "range": self.number, "slots": number})

    def send_items(self, helper: HelperPeer) -> None:
        """Answers a helper process that asks for items."""
        found = self._ranges.take(self._processes) if helper in self._helpers else None
        if found is not None:
            self._helpers[helper].taken.append(found)
        helper.send({"do": "items", "range": self.number, "items": None if found is None else asdict(found)})

    def helper_ended(self, helper: HelperPeer, tally: Tally, *, well: bool) -> None:
        """Counts the work of a helper process. Unless it ended ``well``, its items are handed out again."""
        assigned = self._helpers.pop(helper, None)
        if assigned is None:
            return
        self._tally += tally
        if not well and not self._stopped:
            self._ranges.give_back(assigned.taken)
            self._spare += assigned.slots
        self._changed.set()
