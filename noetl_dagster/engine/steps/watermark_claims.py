"""Claims of watermarks: one execution at a time loads the rows behind a watermark.

A claim is an event of the log. It ends with its visit; if later steps store the rows, with the execution. An execution
whose process is gone keeps its claims until recovery should have resumed it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError, ToolError
from noetl_dagster.events.connection import PATIENCE
from noetl_dagster.events.queries import (
    IDLE,
    RUNNING_CHILDREN,
    WAITS,
    WATERMARK_CLAIMANT,
    WATERMARK_CLAIMS,
    WATERMARK_LOCK,
)
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import ConcurrentRuns
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.worker.execution import Visit

RECOVERY_SECONDS = 120.0
"""Added to the backoff of recovery: for its sensor, which looks every half minute, and for the start of a run."""

PAUSE_SECONDS = (0.02, 1.0)
"""Shortest and longest pause between two looks at the claim of another execution."""


class WatermarkKey(NamedTuple):
    """The name of a watermark: the playbook's path, the step's or given name, and the partition or an empty text."""

    playbook: str
    name: str
    partition: str

    @classmethod
    def of(cls, kept: dict[str, Any]) -> WatermarkKey:
        """Returns the place of a watermark in the log."""
        return cls(*(kept[field] for field in cls._fields))


class WatermarkClaim(NamedTuple):
    """The end of a wait.

    Attributes:
        held: whether the execution has a claim of its own; not if one that started it has.
        anew: whether it made one just now; not if the visit had one and no other execution has claimed since.
    """

    held: bool
    anew: bool


class WatermarkClaims:
    """Claims watermarks for visits of steps."""

    def __init__(self, runtime: Runtime, liveness: Liveness) -> None:
        self._runtime = runtime
        self._liveness = liveness

    async def claim(self, visit: Visit, place: WatermarkKey, mode: ConcurrentRuns) -> WatermarkClaim:
        """Claims a watermark; while another execution has it, waits or raises.

        Raises:
            ToolError: ``mode`` is ``fail``; or the other one waits for this one, directly or by others.
        """
        told, (pause, longest) = 0, PAUSE_SECONDS
        while True:
            claimed, holder = await with_retries(partial(self._try, visit, place, list[Event]()), PATIENCE)
            if claimed is not None:
                return claimed
            which = f"step {visit.step}: execution {holder} loads up to the same watermark, {place.name!r}"
            if mode is ConcurrentRuns.FAIL:
                raise ToolError(
                    f"{which}; start this one again when that one has ended, or write state.concurrent: wait",
                    kind="claim",
                    code="WATERMARK_CLAIMED",
                    retryable=True,
                )
            if holder != told:
                told = holder
                await self._tell(visit, holder, f"{which}; this one waits for it")
            circle = await self._circle(visit.execution.id, holder)
            if circle and visit.execution.id == max(circle):
                raise ToolError(
                    f"{which}, and waits for a watermark that this one has. This one fails, so that the other goes on; "
                    "resume it when that one has ended",
                    kind="claim",
                    code="WATERMARK_DEADLOCK",
                    retryable=True,
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)

    async def _try(self, visit: Visit, place: WatermarkKey, made: list[Event]) -> tuple[WatermarkClaim | None, int]:
        """Claims a watermark unless another execution has it; returns the id of the latter otherwise.

        Args:
            made: gets the claim. One of an earlier attempt stands if it was committed, although its answer was lost.
        """
        own = visit.execution.id
        async with self._runtime.pool.acquire() as connection, connection.transaction():
            await connection.execute(WATERMARK_LOCK, *place)
            if made and await self._runtime.log.present(made, connection=connection):
                return WatermarkClaim(held=True, anew=True), own
            holder = await connection.fetchval(WATERMARK_CLAIMANT, *place)
            claims = [] if holder is None else await connection.fetch(WATERMARK_CLAIMS, *place, holder)
            if holder == own:
                if (visit.step, visit.number) in {(one["node_name"], one["visit"]) for one in claims}:
                    return WatermarkClaim(held=True, anew=False), own
            elif holder is not None and await self._holds(holder, claims, connection):
                if holder in await self._ancestors(visit.execution.state, connection):
                    return WatermarkClaim(held=False, anew=False), own  # which waits for this execution
                return None, holder
            made.append(self._event(visit, place))
            await self._runtime.log.append(made[-1:], connection=connection)
        return WatermarkClaim(held=True, anew=True), own

    async def _holds(self, holder: int, claims: list[Any], connection: Any) -> bool:
        """Returns whether one of an execution's claims is still valid."""
        try:
            state = await self._runtime.state(holder, connection)
        except ExecutionNotFoundError:  # retention has removed the beginning of its log
            return False
        if not state.is_running:
            return False
        ends = [state.end_of(one["node_name"], one["visit"]) for one in claims]
        if all(end is not None and not (end.watermark or {}).get("pending") for end in ends):
            return False
        line = [holder, *await self._ancestors(state, connection)]
        for one in line:  # the process of a child is that of its parent
            if await self._liveness.is_driven(one):
                return True
        idle = await connection.fetchrow(IDLE, line[-1])
        backoff = self._runtime.settings.recovery_backoff_seconds * 2 ** idle["recoveries"]
        return bool(idle["seconds"] < backoff + RECOVERY_SECONDS)

    async def _ancestors(self, state: ExecutionState, connection: Any) -> list[int]:
        found, parent = [], state.parent_execution_id
        while parent is not None:
            found.append(parent)
            parent = (await self._runtime.state(parent, connection)).parent_execution_id
        return found

    def _event(self, visit: Visit, place: WatermarkKey) -> Event:
        state = visit.execution.state
        meta: dict[str, Any] = {"visit": visit.number, "epoch": state.epoch}
        event = self._runtime.event(state, EventType.STATE_CLAIMED, visit.step, "step", "RUNNING", meta)
        event.meta["watermark"] = {**place._asdict(), "claim": True, "since": str(-event.event_id)}
        return event

    async def _tell(self, visit: Visit, holder: int, message: str) -> None:
        state = visit.execution.state
        meta = {"visit": visit.number, "epoch": state.epoch, "waits_for": str(holder)}
        event = self._runtime.event(state, EventType.WARNING, visit.step, "step", "WARNING", meta)
        event.error = message
        await self._runtime.buffer.append([event])

    async def _circle(self, own: int, holder: int) -> set[int]:
        """Returns the executions that wait for each other, this one and the holder among them; empty if none do."""
        reads, waits, frontier = self._runtime.reads, dict[int, set[int]](), [holder]
        while frontier:
            one = frontier.pop()
            if one == own or one in waits:
                continue
            rows = [*await reads.fetch(WAITS, one), *await reads.fetch(RUNNING_CHILDREN, one)]
            waits[one] = {row["execution_id"] for row in rows}
            frontier += waits[one]
        circle, before = {own}, set[int]()
        while circle != before:
            before = set(circle)
            circle |= {one for one, others in waits.items() if others & circle}
        return circle if holder in circle else set()
