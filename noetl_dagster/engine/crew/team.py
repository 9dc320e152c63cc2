"""One range of a loop, worked on by the process that drives it and by helpers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from noetl_dagster.engine.crew.ranges import Range, Ranges
from noetl_dagster.engine.crew.wire import Message

Work = Callable[[], Coroutine[Any, Any, None]]

CANCEL_SECONDS = 30.0
"""A helper that does not end what it was told to cancel is killed."""

CANCELLED = "cancelled"
"""What a helper says of work that it was told to cancel, or that ended with it."""

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Job:
    """What a team works on: one activation of a loop. ``tool_kinds``: whose modules a helper needs."""

    execution_id: int
    step: str
    visit: int
    loop_id: str
    shard: bool
    tool_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """How many items succeeded and failed."""

    done: int = 0
    failed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.done + other.done, self.failed + other.failed)


class Share(Protocol):
    """What one process has of a team's work."""

    async def take(self) -> Range | None:
        """The next items for this process; None when nothing is left."""
        ...

    def leaves(self) -> bool:
        """Asked by a worker between two items: whether its place goes to another process, so that it ends."""
        ...

    async def run(self, work: Work) -> Tally:
        """Runs as many copies of ``work`` as this process has places, and waits for the other processes.

        Returns:
            What the other processes have done.
        """
        ...

    def stop(self) -> None:
        """Nobody takes any more items."""
        ...


class Mate(Protocol):
    """A helper as a team sees it."""

    def send(self, message: Message) -> None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class _Place:
    """What a helper has of a team: its workers, those it is still to get, and the ranges it took."""

    workers: int = 0
    wanted: int = 0
    taken: list[Range] = field(default_factory=list)


class Team:
    """The driver's share, and the books of everybody's.

    So many places as the loop allows at once are spread over the processes: a helper that comes later gets the
    places of the driver's workers as these come to the end of an item. The places of one that is gone come back.

    Args:
        places: commands that run at the same time, in all processes together.
        processes: that may come to work on it; for fewer the ranges are larger.
    """

    def __init__(self, job: Job, start: int, stop: int, places: int, processes: int = 1) -> None:
        self.number = next(_numbers)
        self.job = job
        self._ranges = Ranges(start, stop)
        self._places = places
        self._processes = processes
        self._mates: dict[Mate, _Place] = {}
        self._tally = Tally()
        self._spare = 0
        self._stopped = False
        self._news = asyncio.Event()

    # -- the driver's share --------------------------------------------------------------------------

    async def take(self) -> Range | None:
        return self._ranges.take(self._processes)

    def leaves(self) -> bool:
        if self._stopped:
            return True
        if self._ranges:
            for mate, place in self._mates.items():
                if place.wanted:
                    self._hand_over(mate, place, 1)
                    return True
        return False

    async def run(self, work: Work) -> Tally:
        tasks: set[asyncio.Task[None]] = set()
        self._spare = self._places - sum(place.workers for place in self._mates.values())
        try:
            while self._spare or tasks or self._mates:
                tasks |= {asyncio.create_task(work()) for _ in range(self._spare)}
                self._spare = 0
                self._news.clear()
                if not tasks:
                    self._send_home()
                await self._anything(tasks)
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    task.result()
            return self._tally
        except BaseException:
            self._tell("cancel")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._cancelled()

    async def _anything(self, tasks: set[asyncio.Task[None]]) -> None:
        """Returns when a worker has ended or a helper has."""
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({*tasks, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    async def _cancelled(self) -> None:
        """Returns when nothing of this team runs anywhere any more."""
        deadline = asyncio.get_running_loop().time() + CANCEL_SECONDS
        while self._mates:
            self._news.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                for mate in self._mates:
                    mate.kill()
                deadline += CANCEL_SECONDS

    def _send_home(self) -> None:
        """Helpers for which no place has become free need not wait for one."""
        for mate, place in self._mates.items():
            if not place.workers:
                mate.send({"do": "over", "team": self.number})

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._ranges.clear()
            self._tell("stop")

    def _tell(self, what: str) -> None:
        for mate in self._mates:
            mate.send({"do": what, "team": self.number})

    # -- the helpers' --------------------------------------------------------------------------------

    def join(self, mate: Mate, processes: int, *, at_once: bool) -> None:
        """Takes a helper in, one of so many processes.

        Args:
            at_once: nobody works yet, so its places are free.
        """
        wanted = self._places // processes
        if not wanted or not self._ranges or mate in self._mates or len(self._mates) >= processes - 1:
            return
        place = self._mates[mate] = _Place(wanted=wanted)
        job = self.job
        mate.send(
            {
                "do": "open",
                "team": self.number,
                "execution_id": job.execution_id,
                "step": job.step,
                "visit": job.visit,
                "loop_id": job.loop_id,
                "shard": job.shard,
            }
        )
        if at_once:
            self._hand_over(mate, place, wanted)

    def _hand_over(self, mate: Mate, place: _Place, number: int) -> None:
        place.wanted -= number
        place.workers += number
        mate.send({"do": "work", "team": self.number, "places": number})

    def asked(self, mate: Mate) -> None:
        """A helper wants more to do."""
        found = self._ranges.take(self._processes) if mate in self._mates else None
        if found is None:
            mate.send({"do": "range", "team": self.number})
            return
        self._mates[mate].taken.append(found)
        mate.send(
            {
                "do": "range",
                "team": self.number,
                "start": found.start,
                "stop": found.stop,
                "again": found.again,
            }
        )

    def ended(self, mate: Mate, tally: Tally, *, well: bool) -> None:
        """A helper has no more work here: all that it took has ended, unless it is not ``well``."""
        place = self._mates.pop(mate, None)
        if place is None:
            return
        self._tally += tally
        if not well and not self._stopped:
            self._ranges.give_back(place.taken)
            self._spare += place.workers
        self._news.set()
