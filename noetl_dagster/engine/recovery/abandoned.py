"""Finds RUNNING executions that no process drives, decides when each is resumed, and resumes it within seconds.

The log holds everything that a resumption needs; NATS and the memory of the dead process do not matter. Resumptions are
bounded and back off, so that an execution that kills its process ends eventually.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.queries import IDLE
from noetl_dagster.playbook.models import Playbook

logger = logging.getLogger(__name__)

RECOVERY = "recovery"
"""Key in the meta of ``execution.resumed``: the epoch was opened by recovery, not by a person."""

ONE_PROCESS = "one_process"
"""Key in the meta of the event that opens an epoch: one process drives the epoch from its first step to its last."""

MOST_REQUESTS = 1_000
"""Maximum number of requests for one epoch: the pause before each is twice as long as the one before."""

LOOK_SECONDS = 1.0
"""Longest pause between two looks at the running executions."""

SHORTEST_SECONDS = 0.1

_ALONE = "SELECT pg_try_advisory_xact_lock(hashtext('noetl.recovery'), hashint8($1))"
"""Of several services that see the same execution, one resumes it."""


class Verdict(StrEnum):
    """The decision about an abandoned execution."""

    RESUME = "resume"
    WAIT = "wait"
    GIVE_UP = "give up"


class ResumeRequest(NamedTuple):
    """The latest of several ``requests`` to open an ``epoch``, ``at`` a Unix time. The caller remembers it."""

    epoch: Annotated[int, Field(ge=1)]
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)]
    at: Annotated[float, Field(allow_inf_nan=False)]


REQUESTS = TypeAdapter(dict[int, ResumeRequest])
"""Requests by execution, as the cursor of a sensor has them."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An execution whose process is gone. Resuming opens ``epoch``, from the Unix time ``due`` on.

    Attributes:
        source: the playbook's text.
        attempts: the resumptions by recovery so far.
    """

    execution_id: int
    playbook: str
    source: str
    epoch: int
    attempts: int
    due: float
    verdict: Verdict


class Recovery:
    """Decides about abandoned executions. It starts nothing; the caller does."""

    def __init__(self, runtime: Runtime, lifecycle: Lifecycle, liveness: Liveness) -> None:
        self._runtime = runtime
        self._lifecycle = lifecycle
        self._liveness = liveness

    async def abandoned(
        self, requested: Mapping[int, ResumeRequest] | None = None, *, now: datetime | None = None
    ) -> list[Abandoned]:
        """Returns every execution without a driver, oldest first, with its verdict; ``requested`` are earlier requests.

        A driver may be between two processes (Dagster's multiprocess executor starts one for each op), so
        an execution counts as abandoned only after a pause without any event.
        """
        await Projection(self._runtime.pool).catch_up()
        moment = (now or datetime.now(UTC)).timestamp()
        judged = [
            await self.judge(execution_id, (requested or {}).get(execution_id), now=moment)
            for execution_id in await self._liveness.undriven()
        ]
        return [one for one in judged if one is not None]

    async def judge(
        self, execution_id: int, request: ResumeRequest | None = None, *, now: float, grace: float | None = None
    ) -> Abandoned | None:
        """Decides about an execution without a driver; None if it has ended, or cannot be resumed.

        Args:
            request: the latest request to resume it.
            now: Unix time.
            grace: seconds without an event after which the first resumption is due if one process drove the
                execution; that process had no reason to release it before the end.
        """
        try:
            return await self._judge(execution_id, request, now, grace)
        except DATABASE_AWAY:
            raise
        except Exception as error:  # such as an event that somebody changed; the others do not wait for it
            hint = f"see 'noetl-dagster verify {execution_id}', or end it with 'noetl-dagster cancel {execution_id}'"
            logger.warning("execution %d cannot be resumed: %r; %s", execution_id, error, hint)
            return None

    async def give_up(self, abandoned: Abandoned) -> None:
        """Ends an execution whose resumptions failed."""
        logger.warning(
            "execution %d of %s lost its process again after %d resumptions; it is ended",
            abandoned.execution_id,
            abandoned.playbook,
            abandoned.attempts,
        )
        execution = await self._runtime.load(abandoned.execution_id)
        await self._lifecycle.fail(
            execution,
            f"its process ended {abandoned.attempts + 1} times without a word; look for crashes and memory "
            f"limits, then go on with 'noetl-dagster resume {abandoned.execution_id}'",
        )

    async def _judge(
        self, execution_id: int, request: ResumeRequest | None, now: float, grace: float | None
    ) -> Abandoned | None:
        execution = await self._runtime.load(execution_id)
        state = execution.state
        if not state.is_running:
            return None
        settings, idle = self._runtime.settings, await self._runtime.pool.fetchrow(IDLE, execution_id)
        attempts, latest, quiet_since = int(idle["recoveries"]), idle["latest"], idle["since"]
        one_process = ONE_PROCESS in latest or (latest.get("runner") == Runner.ENGINE and bool(state.visits))
        if request is not None and request.epoch == state.epoch + 1:
            attempts += request.requests
            quiet_since = max(quiet_since, request.at)
        pause = settings.recovery_backoff_seconds * 2**attempts
        if grace is not None and one_process and attempts == 0:
            pause = min(pause, grace)
        if quiet_since > now + pause:  # the clock of the dead process was ahead
            quiet_since = now - pause
        due = quiet_since + pause
        verdict = Verdict.RESUME if attempts < settings.recovery_attempts else Verdict.GIVE_UP
        if now < due:
            verdict = Verdict.WAIT
        return Abandoned(
            execution_id,
            state.playbook,
            execution.playbook.source,
            state.epoch + 1,
            attempts,
            due,
            verdict,
        )


Find = Callable[[Abandoned], Awaitable[Playbook | None]]
"""Returns the playbook of an execution if this service may resume it."""

Resume = Callable[[Playbook, Abandoned], Awaitable[None]]
"""Lets a process resume an execution, and holds the execution until that process does."""


class RecoveryWatch:
    """Looks for executions whose process has died, and resumes them.

    A living process holds a lock in the database, and restores it at once if it loses its connection. An execution is
    resumed if its lock has been missing for the grace period, and its log has had no event for as long. After an outage
    of the database, the watch gives every process the time of a normal resumption to return.

    Args:
        grace: seconds.
        find: see :data:`Find`.
        resume: see :data:`Resume`.
    """

    def __init__(
        self, runtime: Runtime, liveness: Liveness, recovery: Recovery, *, grace: float, find: Find, resume: Resume
    ) -> None:
        self._pool = runtime.pool
        self._liveness = liveness
        self._recovery = recovery
        self._projection = Projection(runtime.pool)
        self._grace = grace
        self._patience = runtime.settings.recovery_backoff_seconds
        self._remembered_seconds = self._patience * 2 ** (runtime.settings.recovery_attempts + 1)
        self._find = find
        self._resume = resume
        self._due: dict[int, float] = {}
        self._requested: dict[int, ResumeRequest] = {}

    async def run(self) -> None:
        """Watches until it is cancelled."""
        grace = self._grace
        while True:
            try:
                await self._look(grace)
                grace = self._grace
            except Exception as error:  # an outage; and a defect must not end the watch
                logger.warning("running executions cannot be watched now: %r", error)
                self._due.clear()
                grace = self._patience
            next_due = min(self._due.values(), default=math.inf) - time.time()
            await asyncio.sleep(min(max(next_due, SHORTEST_SECONDS), LOOK_SECONDS))

    async def _look(self, grace: float) -> None:
        """Acts on executions that are due. Those that it sees for the first time are due after ``grace``."""
        await self._projection.catch_up()
        now = time.time()
        undriven = await self._liveness.undriven()
        self._due = {one: self._due.get(one, now + grace) for one in undriven}
        # while a run is about to start, the execution is held; if the run dies before its first event, it counts
        oldest = now - self._remembered_seconds
        self._requested = {one: request for one, request in self._requested.items() if request.at > oldest}
        for execution_id, due in self._due.items():
            if now < due:
                continue
            try:
                self._due[execution_id] = await self._act(execution_id, now)
            except DATABASE_AWAY:
                raise
            except Exception as error:  # the others do not wait for it
                logger.warning("execution %d is not resumed now: %r", execution_id, error)
                self._due[execution_id] = now + self._patience

    async def _act(self, execution_id: int, now: float) -> float:
        """Resumes an execution or ends it, if it is time; returns when to look at it again, as Unix time."""
        request = self._requested.get(execution_id)
        one = await self._recovery.judge(execution_id, request, now=now, grace=self._grace)
        later = now + self._patience
        if one is None:
            return later
        if one.verdict is Verdict.WAIT:
            return one.due
        playbook = await self._find(one)
        if playbook is None:  # the recovery sensor of its code location may resume it
            return later
        if one.verdict is Verdict.GIVE_UP:
            await self._recovery.give_up(one)
            return later
        async with self._pool.acquire() as connection, connection.transaction():
            if not await connection.fetchval(_ALONE, execution_id):
                return later
            if execution_id not in await self._liveness.undriven(connection):
                return later
            logger.warning("execution %d of %s lost its process; resumed", execution_id, one.playbook)
            count = request.requests + 1 if request is not None and request.epoch == one.epoch else 1
            self._requested[execution_id] = ResumeRequest(one.epoch, count, now)
            await self._resume(playbook, one)
        return later
