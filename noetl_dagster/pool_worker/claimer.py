"""Claims commands for a worker: many in one request, and only as many as it will soon run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.transport.http import AnswerError
from noetl_dagster.pool_worker.control import ControlPlane, Executions
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.worker.context import MOST_AT_ONCE, Grant

logger = logging.getLogger(__name__)

AHEAD_SECONDS = 0.05
"""Commands are claimed ahead of the free slots for this long, if they are short enough for it to matter."""

MOST_AHEAD = 256

KEPT_SECONDS = 1.0
"""A command that has not started this long after its claim is released: another worker may have capacity."""

CHECK_SECONDS = 0.25
RETRY_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""A stopping worker waits this long for the answer to a pending claim."""

SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class HeldCommand:
    """A claimed command. ``event_id`` is that of its ``command.claimed`` event, ``at`` the loop's time of the claim."""

    tool_kind: str
    event_id: int
    grant: Grant
    at: float


@dataclass(eq=False, slots=True)
class Claimer:
    """Claims commands while there is capacity, hands them to the slots, and counts what runs.

    When woken, it claims as many commands as the worker can run now. If commands are shorter than a claim, it claims
    some more, so that the slots do not wait for the next claim. It releases the commands that it cannot start soon.

    Attributes:
        slots: commands at once.
        limits: commands at once by tool kind, for kinds with fewer than there are slots.
        interval: seconds after which it claims without having been woken.
    """

    control: ControlPlane
    ids: Snowflake
    worker_id: str
    slots: int
    executions: Executions
    limits: Mapping[str, int]
    interval: float
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _running: Counter[str] = field(default_factory=Counter)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _claimed: deque[HeldCommand] = field(default_factory=deque)
    _arrived: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _usual_seconds: float | None = None
    _pending_ids: list[int] = field(default_factory=list)
    _to_release: list[int] = field(default_factory=list)
    _claiming: asyncio.Task[None] | None = None
    _closing: bool = False
    _releasing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _exhausted: set[str] = field(default_factory=set)

    @property
    def active(self) -> int:
        """Commands that run now."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Commands that are claimed and have not started."""
        return len(self._claimed)

    @property
    def free(self) -> int:
        """Further commands that may start now; below zero while some wait for others to end."""
        return self.slots - self.active - self.waiting

    def capacity(self, tool_kind: str) -> int:
        """Returns how many further commands of a tool kind may start now."""
        left = self._left(tool_kind) if tool_kind in self.limits else self.free
        return max(min(self.free, left), 0)

    def open(self) -> None:
        """Starts to claim."""
        self._woken.set()
        self.tasks = [asyncio.create_task(work()) for work in (self._claim, self._release_late)]

    def wake(self) -> None:
        """Claims soon, because commands wait in the queue."""
        self._woken.set()

    async def next(self) -> HeldCommand:
        """Returns the next command, which counts as running until :meth:`ended`."""
        while True:
            await self._arrived.acquire()
            if self._claimed:
                claimed = self._claimed.popleft()
                self._running[claimed.tool_kind] += 1
                if self.waiting <= self._ahead // 2:
                    self._freed.set()
                return claimed

    def ended(self, claimed: HeldCommand, seconds: float) -> None:
        """Frees the slot of a command that ran for so many seconds."""
        if claimed.tool_kind in self._exhausted:
            self._woken.set()
        usual = seconds if self._usual_seconds is None else self._usual_seconds
        self._usual_seconds = usual + SMOOTHING * (seconds - usual)
        self._running[claimed.tool_kind] -= 1
        self._freed.set()

    async def idle(self) -> None:
        """Waits until no command runs."""
        while self.active:
            self._freed.clear()
            await self._freed.wait()

    async def close(self) -> None:
        """Claims nothing more and releases the commands that have not started."""
        self._closing = True
        if self._claiming is not None:  # its answer must not arrive after the release
            await asyncio.wait({self._claiming}, timeout=ANSWER_SECONDS)
        await cancel_and_wait(*self.tasks)
        not_started = [one.event_id for one in self._claimed]
        self._claimed.clear()
        await self._release(not_started + self._pending_ids)

    def _left(self, tool_kind: str) -> int:
        """Returns how many slots are left of those of a kind with a limit."""
        waiting = sum(one.tool_kind == tool_kind for one in self._claimed)
        return max(self.limits[tool_kind] - self._running[tool_kind] - waiting, 0)

    @property
    def _ahead(self) -> int:
        """Commands to claim beyond the free slots: none if a command takes longer than a claim is worth."""
        if self._usual_seconds is None or self._usual_seconds >= AHEAD_SECONDS:
            return 0
        return min(MOST_AHEAD, int(self.slots * (AHEAD_SECONDS / max(self._usual_seconds, 1e-4) - 1)))

    def _wanted(self) -> int:
        """Returns how many commands to claim now; none while enough of them wait."""
        ahead = self._ahead
        wanted = min(self.free + ahead, MOST_AT_ONCE)
        return max(wanted, 0) if not ahead or self.waiting <= ahead // 2 else 0

    async def _claim(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval):
                    await self._woken.wait()
            wanted = self._wanted()
            if not wanted:
                self._freed.clear()
                await self._freed.wait()
                continue
            self._woken.clear()
            if not self._pending_ids:  # after a lost answer the same claim has the same answer
                self._pending_ids = [self.ids.next() for _ in range(wanted)]
            self._claiming = asyncio.create_task(self._claim_batch())
            try:
                await self._claiming
            except AnswerError as error:  # the next one would be the same
                await self._give_up(error)
            except (ServiceError, *DATABASE_AWAY) as error:
                logger.warning("commands cannot be claimed now: %s", error)
                self._woken.set()
                await asyncio.sleep(RETRY_SECONDS)
            except asyncpg.PostgresError:  # of the statement
                raise
            except Exception as error:  # an unexpected answer must not end a worker that looks alive
                await self._give_up(error)

    async def _give_up(self, error: Exception) -> None:
        """Releases the commands of a claim whose answer cannot be read."""
        logger.error("the answer to a claim cannot be read; its commands are released", exc_info=error)
        self._woken.set()
        event_ids, self._pending_ids = self._pending_ids, []
        await self._release(event_ids)
        await asyncio.sleep(RETRY_SECONDS)

    async def _claim_batch(self) -> None:
        limits = {kind: min(self._left(kind), len(self._pending_ids)) for kind in self.limits}
        batch = await self.control.claim(self.worker_id, self._pending_ids, limits, self.executions.versions())
        granted = list(batch.grants())
        full = len(granted) == len(self._pending_ids)
        if full or (granted and limits) or any(grant.claim > 1 for *_, grant in granted):
            # there may be more: an answer has only some commands of limited kinds and of last attempts
            self._woken.set()
        for execution_id, version, events in batch.execution_states():
            self.executions.learn(execution_id, version, events)
        self._pending_ids = []  # nothing below fails
        got = Counter(kind for kind, *_ in granted)
        self._exhausted = {kind for kind, most in limits.items() if got[kind] >= most}
        now = asyncio.get_running_loop().time()
        for kind, event_id, grant in granted:
            self._claimed.append(HeldCommand(kind, event_id, grant, now))
            self._arrived.release()

    async def _release_late(self) -> None:
        """Releases commands that have waited too long behind commands that turned out to be long."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._to_release:
                await self._release([])
            if not self._claimed or self.active < self.slots:
                continue
            late = asyncio.get_running_loop().time() - KEPT_SECONDS
            if self._claimed[0].at > late:
                continue
            self._usual_seconds = AHEAD_SECONDS  # they are no longer short
            released = [one.event_id for one in self._claimed if one.at <= late]
            self._claimed = deque(one for one in self._claimed if one.at > late)
            await self._release(released)

    async def _release(self, event_ids: list[int]) -> None:
        """Releases claims, and those that could not be released earlier."""
        self._to_release += event_ids
        try:
            async with self._releasing:
                while self._to_release:
                    released = self._to_release[:MOST_AT_ONCE]
                    await self.control.release(self.worker_id, released)
                    del self._to_release[: len(released)]
        except (ServiceError, *DATABASE_AWAY) as error:
            logger.warning("%d claims cannot be released now: %s", len(self._to_release), error)
