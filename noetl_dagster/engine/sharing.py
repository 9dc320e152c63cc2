"""A range of a loop's items, shared between the process that drives the loop and its helper processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from noetl_dagster.process.forking import AsyncChannel, Message

Work = Callable[[], Coroutine[Any, Any, None]]

LARGEST = 500
"""Items of one range, at most."""

CANCEL_SECONDS = 30.0
"""A helper process that does not end cancelled work within this time is killed."""

CANCELLED = "cancelled"
"""Error that a helper process reports for cancelled work."""

_numbers = count(1)


class Helper(AsyncChannel):
    """A helper process, as the driver sees it."""

    pid: int | None = None

    def kill(self) -> None:
        """Ends the process at once; its items go to others."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


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


@dataclass(frozen=True, slots=True)
class SharedLoop:
    """The loop run of a loop whose items are shared.

    Attributes:
        resumed: an earlier process may have issued or ended commands of the same run.
        tool_kinds: those whose modules a helper process needs.
    """

    execution_id: int
    step: str
    visit: int
    loop_id: str
    shard: bool
    resumed: bool = True
    tool_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of items that succeeded and failed."""

    done: int = 0
    failed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.done + other.done, self.failed + other.failed)


class RemoteItems:
    """A helper process's item source, which asks the driver for items; the methods are those of `SharedItems`."""

    def __init__(self, driver: AsyncChannel, number: int) -> None:
        self._driver = driver
        self._number = number
        self._asked: deque[asyncio.Future[Range | None]] = deque()
        self._slots = 0
        self._changed = asyncio.Event()
        self._stopped = False
        self._over = False

    async def take(self) -> Range | None:
        """Asks the driver for the next items."""
        if self._stopped or self._over:
            return None
        future: asyncio.Future[Range | None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._driver.send({"do": "take", "range": self._number})
        return await future

    def must_end(self) -> bool:
        """Reports that the loop was stopped."""
        return self._stopped

    def stop(self) -> None:
        """Stops the loop in all processes."""
        self._stopped = True
        self._driver.send({"do": "failed", "range": self._number})

    async def run(self, work: Work) -> Tally:
        """Works until the driver has nothing more; slots may be added meanwhile."""
        async with asyncio.TaskGroup() as group:
            while not self._over and not self._stopped:
                self._changed.clear()
                for _ in range(self._slots):
                    group.create_task(work())
                self._slots = 0
                await self._changed.wait()
        return Tally()

    def handle(self, message: Message) -> None:
        """Handles a message of the driver."""
        match message["do"]:
            case "work":
                self._slots += message["slots"]
            case "over":
                self._over = True
            case "stop":
                self._stopped = True
            case "items":
                fields = message["items"]
                self._over = self._over or fields is None
                asked = self._asked.popleft()
                if not asked.done():  # the coroutine that asked may have been cancelled meanwhile
                    asked.set_result(None if fields is None else Range(**fields))
        self._changed.set()


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
        self.processes = processes
        self._helpers: dict[Helper, _Assignment] = {}
        self._tally = Tally()
        self._spare = 0
        self._stopped = False
        self._changed = asyncio.Event()

    # -- the driver's items --------------------------------------------------------------------------

    async def take(self) -> Range | None:
        """Returns the next items for the driver."""
        return self._ranges.take(self.processes)

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
        """Runs as many copies of ``work`` as this process has slots; returns the counts of all other processes."""
        tasks: set[asyncio.Task[None]] = set()
        self._spare = self._slots - sum(assigned.slots for assigned in self._helpers.values())
        try:
            while self._spare or tasks or self._helpers:
                tasks |= {asyncio.create_task(work()) for _ in range(self._spare)}
                self._spare = 0
                self._changed.clear()
                if not tasks:  # no slot will become free for those that wait for their first
                    for helper, assigned in self._helpers.items():
                        if not assigned.slots:
                            helper.send({"do": "over", "range": self.number})
                changed = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait({*tasks, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
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

    def stop(self) -> None:
        """Hands out no more items, to any process."""
        if not self._stopped:
            self._stopped = True
            self._ranges = Ranges(0, 0)
            self._send_all("stop")

    def _send_all(self, kind: str) -> None:
        for helper in self._helpers:
            helper.send({"do": kind, "range": self.number})

    # -- the helper processes' -----------------------------------------------------------------------

    def add_helper(self, helper: Helper, processes: int, *, at_once: bool) -> None:
        """Lets a helper process work on the range, as one of ``processes``; ``at_once``: before the driver begins."""
        wanted = self._slots // processes
        if not wanted or not self._ranges or helper in self._helpers or len(self._helpers) >= processes - 1:
            return
        assigned = self._helpers[helper] = _Assignment(wanted=wanted)
        helper.send({"do": "open", "range": self.number, "loop": asdict(self.loop)})
        if at_once:
            self._give_slots(helper, assigned, wanted)

    def _give_slots(self, helper: Helper, assigned: _Assignment, number: int) -> None:
        assigned.wanted -= number
        assigned.slots += number
        helper.send({"do": "work", "range": self.number, "slots": number})

    def send_items(self, helper: Helper) -> None:
        """Answers a helper process that asks for items."""
        next_range = self._ranges.take(self.processes) if helper in self._helpers else None
        if next_range is not None:
            self._helpers[helper].taken.append(next_range)
        helper.send({"do": "items", "range": self.number, "items": None if next_range is None else asdict(next_range)})

    def helper_ended(self, helper: Helper, tally: Tally, *, well: bool) -> None:
        """Counts the work of a helper process. Unless it ended ``well``, its items are handed out again."""
        assigned = self._helpers.pop(helper, None)
        if assigned is None:
            return
        self._tally += tally
        if not well and not self._stopped:
            self._ranges.give_back(assigned.taken)
            self._spare += assigned.slots
        self._changed.set()


ItemSource = SharedItems | RemoteItems
"""The items that one process takes from a shared range."""
