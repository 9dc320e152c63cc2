"""Resumes executions within seconds after the death of their process, from a service that always runs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.recovery.abandoned import Abandoned, Recovery, ResumeRequest, Verdict
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.projection import Projection
from noetl_dagster.playbook.models import Playbook

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Longest pause between two looks at the running executions."""

SHORTEST_SECONDS = 0.1

_ALONE = "SELECT pg_try_advisory_xact_lock(hashtext('noetl.recovery'), hashint8($1))"
"""Of several services that see the same execution, one resumes it."""

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
