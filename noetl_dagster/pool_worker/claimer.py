"""Commands that a worker has claimed and not begun: many in one request, and only what it will soon run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.pool_worker.control import ControlPlane
from noetl_dagster.pool_worker.executions import Executions
from noetl_dagster.pool_worker.places import Places
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.worker.context import MOST_AT_ONCE, Grant

logger = logging.getLogger(__name__)

AHEAD_SECONDS = 0.05
"""Commands are claimed ahead of the slots for about so long, where they are short enough for it to matter."""

MOST_AHEAD = 256

KEPT_SECONDS = 1.0
"""A command that is not begun so long after its claim is given back: another worker may have room for it."""

LOOK_SECONDS = 0.25
AGAIN_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""A worker that stops waits so long for the answer to a claim that is on its way."""

SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class Claimed:
    """A command that this worker is to run. ``event_id`` is that of its ``command.claimed`` event."""

    tool_kind: str
    event_id: int
    grant: Grant
    at: float


class Claimer(Places):
    """Claims commands while there is room, and hands them to the slots.

    A worker that is woken asks for as many commands as it can run now. Where commands are shorter than a claim,
    it asks for some more, so that its slots do not wait for the next claim. What it can not begin it gives back.

    Args:
        slots, limits: as of :class:`Places`.
        interval: seconds after which it asks without having been woken.
    """

    def __init__(
        self,
        control: ControlPlane,
        ids: Snowflake,
        worker_id: str,
        slots: int,
        executions: Executions,
        *,
        limits: Mapping[str, int],
        interval: float,
    ) -> None:
        super().__init__(slots, limits)
        self._control = control
        self._ids = ids
        self._worker_id = worker_id
        self._executions = executions
        self._interval = interval
        self._claimed: deque[Claimed] = deque()
        self._arrived = asyncio.Semaphore(0)
        self._wanted = asyncio.Event()
        self._usual: float | None = None
        self._asked: list[int] = []
        self._owed: list[int] = []
        self._asking: asyncio.Task[None] | None = None
        self._closing = False
        self._handing_back = asyncio.Lock()
        self._bounded: set[str] = set()

    @property
    def waiting(self) -> int:
        """Commands that are claimed and not begun."""
        return len(self._claimed)

    @property
    def free(self) -> int:
        return super().free - self.waiting

    def _left(self, tool_kind: str) -> int:
        left = super()._left(tool_kind) - sum(one.tool_kind == tool_kind for one in self._claimed)
        return max(left, 0)

    def open(self) -> None:
        self._wanted.set()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work()) for work in (self._claim, self._look)]

    def wake(self) -> None:
        """Commands wait in the queue, as somebody says."""
        self._wanted.set()

    async def next(self) -> Claimed:
        """The next command, which counts as running from now on until :meth:`ended`."""
        while True:
            await self._arrived.acquire()
            if self._claimed:
                claimed = self._claimed.popleft()
                self._begin(claimed.tool_kind)
                if self.waiting <= self._ahead // 2:
                    self._freed.set()
                return claimed

    def ended(self, claimed: Claimed, seconds: float) -> None:
        """A command has ended after so long."""
        if claimed.tool_kind in self._bounded:
            self._wanted.set()
        self._usual = seconds if self._usual is None else self._usual + SMOOTHING * (seconds - self._usual)
        self._end(claimed.tool_kind)

    async def close(self) -> None:
        """Claims nothing more and gives back what was not begun."""
        self._closing = True
        if self._asking is not None:  # else its answer might come after what is given back
            await asyncio.wait({self._asking}, timeout=ANSWER_SECONDS)
        await cancel_and_wait(*self._tasks)
        unbegun = [one.event_id for one in self._claimed]
        self._claimed.clear()
        await self._hand_back(unbegun + self._asked)

    @property
    def _ahead(self) -> int:
        """Commands to claim beyond the free slots: none where one takes longer than a claim is worth."""
        if self._usual is None or self._usual >= AHEAD_SECONDS:
            return 0
        return min(MOST_AHEAD, int(self._slots * (AHEAD_SECONDS / max(self._usual, 1e-4) - 1)))

    def _places(self) -> int:
        """How many commands to ask for now; none while enough of them wait."""
        ahead = self._ahead
        places = min(self.free + ahead, MOST_AT_ONCE)
        return max(places, 0) if not ahead or self.waiting <= ahead // 2 else 0

    async def _claim(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._wanted.wait()
            places = self._places()
            if not places:
                self._freed.clear()
                await self._freed.wait()
                continue
            self._wanted.clear()
            if not self._asked:  # else the answer was lost: the same question has the same answer
                self._asked = [self._ids.next() for _ in range(places)]
            self._asking = asyncio.create_task(self._ask())
            try:
                await self._asking
            except (ServiceError, *DATABASE_AWAY) as error:
                logger.warning("commands cannot be claimed now: %s", error)
                self._wanted.set()
                await asyncio.sleep(AGAIN_SECONDS)
            except Exception:  # an answer that nobody foresaw must not end a worker that looks alive
                logger.exception("an answer to a claim cannot be read; what it gave goes back")
                self._wanted.set()
                names, self._asked = self._asked, []
                await self._hand_back(names)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self) -> None:
        limits = {kind: min(self._left(kind), len(self._asked)) for kind in self._limits}
        batch = await self._control.claim_many(self._worker_id, self._asked, limits, self._executions.known())
        granted = list(batch.grants())
        full = len(granted) == len(self._asked)
        if full or (granted and limits) or any(grant.claim > 1 for *_, grant in granted):
            self._wanted.set()  # there may be more: of limited kinds and last chances an answer has not all
        for execution_id, version, events in batch.told():
            self._executions.learn(execution_id, version, events)
        self._asked = []  # from here on nothing fails
        got = Counter(kind for kind, *_ in granted)
        self._bounded = {kind for kind, most in limits.items() if got[kind] >= most}
        now = asyncio.get_running_loop().time()
        for kind, event_id, grant in granted:
            self._claimed.append(Claimed(kind, event_id, grant, now))
            self._arrived.release()

    async def _look(self) -> None:
        """Gives back what has waited for too long behind commands that turned out to be long."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._owed:
                await self._hand_back([])
            if not self._claimed or self.active < self._slots:
                continue
            late = asyncio.get_running_loop().time() - KEPT_SECONDS
            if self._claimed[0].at > late:
                continue
            self._usual = AHEAD_SECONDS  # they are not short any more
            kept = [one for one in self._claimed if one.at > late]
            given = [one.event_id for one in self._claimed if one.at <= late]
            self._claimed = deque(kept)
            await self._hand_back(given)

    async def _hand_back(self, event_ids: list[int]) -> None:
        """Gives claims back, and those that could not be given back before."""
        self._owed += event_ids
        try:
            async with self._handing_back:
                while self._owed:
                    given = self._owed[:MOST_AT_ONCE]
                    await self._control.hand_back(self._worker_id, given)
                    del self._owed[: len(given)]
        except (ServiceError, *DATABASE_AWAY) as error:
            logger.warning("%d claims cannot be given back now: %s", len(self._owed), error)
