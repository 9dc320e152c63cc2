"""One driver for each visit of a step: the process whose ``step.enter`` is in the log works, all others follow.

Two processes may reach the same visit: a run that was resumed twice, an op that Dagster started again, two handlings of
one completion. The unique index on the turn, the number of the driver, admits one of them. So a loop has one
``loop.done``, a command is issued and dispatched once, and the arcs fire once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.log import as_event
from noetl_dagster.events.queries import STEP_CHECKS, STEP_EXIT, STEP_TURNS
from noetl_dagster.events.state import StepEnd
from noetl_dagster.events.types import Event
from noetl_dagster.worker.command import own_worker_id
from noetl_dagster.worker.execution import Execution

POLL_SECONDS = (0.02, 0.5)
"""Shortest and longest pause of a follower between two queries of the log."""

_alive: set[int] = set()
"""Ids of the ``step.enter`` events on which tasks of this process work, or which they try to write."""


class VisitDrivers:
    """Lets one process drive a visit; the others follow it, and one of them takes over when it dies."""

    def __init__(self, runtime: Runtime, liveness: Liveness) -> None:
        self._runtime = runtime
        self._liveness = liveness

    @asynccontextmanager
    async def turn(self, execution: Execution, entered: Event) -> AsyncIterator[int | None]:
        """Appends ``step.enter`` and drives the visit until the block ends.

        Args:
            entered: the event; it gets the turn, and a new id for each try.

        Yields:
            The number of the turn; None when another process has ended the visit, which is in the state now.
        """
        turn = 1
        while True:
            entered.meta["turn"] = turn
            entered.worker_id = own_worker_id()
            _alive.add(entered.event_id)
            try:
                if entered.event_id in await self._runtime.buffer.append([entered]):
                    yield turn
                    return
            finally:
                _alive.discard(entered.event_id)
            step, visit = entered.node_name or "", int(entered.meta["visit"])
            if await self._follow(execution, step, visit):
                yield None
                return
            row = await self._runtime.pool.fetchrow(STEP_TURNS, *_place(execution, step, visit))
            turn = (row["turn"] if row is not None else 0) + 1
            if row is not None and row["context"]:  # this driver uses the same reads as the one before
                entered.context = row["context"]
            entered.event_id = self._runtime.ids.next()

    async def settle(self, execution: Execution, step: str, visit: int) -> StepEnd | None:
        """Applies the end of a visit in the log to the state, if there is one in this epoch."""
        record = await self._runtime.pool.fetchrow(STEP_EXIT, *_place(execution, step, visit))
        if record is None:
            return None
        for check in await self._runtime.pool.fetch(STEP_CHECKS, *_place(execution, step, visit)):
            execution.state.apply(as_event(check))
        execution.state.apply(as_event(record))
        return execution.state.ends[(step, visit)]

    async def _follow(self, execution: Execution, step: str, visit: int) -> bool:
        """Waits for the driver of a visit; returns true if it ended the visit, false if it is gone."""
        pause, longest = POLL_SECONDS
        while True:
            if await self.settle(execution, step, visit) is not None:
                return True
            if not await self._driver_lives(execution, step, visit):
                # it may have ended the visit just before it died
                return await self.settle(execution, step, visit) is not None
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)

    async def _driver_lives(self, execution: Execution, step: str, visit: int) -> bool:
        row = await self._runtime.pool.fetchrow(STEP_TURNS, *_place(execution, step, visit))
        if row is None:
            return False
        if row["worker_id"] == own_worker_id():
            return row["event_id"] in _alive
        return await self._liveness.is_driven_by(execution.id, row["worker_id"])


def _place(execution: Execution, step: str, visit: int) -> tuple[int, str, str, str]:
    return execution.id, step, str(visit), str(execution.state.epoch)
