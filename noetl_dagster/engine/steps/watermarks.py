"""Watermarks of steps (``state``): their values when a visit begins and when it ends.

The log is the only truth: a watermark is the greatest value that counts, so a slower execution never turns it back.
Setting it by hand discards earlier progress, also that of executions that had begun before.

A claim lets one execution at a time load the rows behind a watermark. It is an event of the log. It ends with
its visit; if later steps store the rows, with the execution. An execution whose process is gone keeps its claims
until recovery should have resumed it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError, TemplateError, ToolError
from noetl_dagster.events.connection import PATIENCE
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.queries import (
    HAS_RESULTS,
    IDLE,
    NEXT_NODE,
    REACHED,
    RUNNING_CHILDREN,
    WAITS,
    WATERMARK,
    WATERMARK_CLAIMANT,
    WATERMARK_CLAIMS,
    WATERMARK_LOCK,
    WATERMARK_OF_OTHERS,
    WATERMARKS,
    WATERMARKS_BETWEEN,
)
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import ConcurrentRuns
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.tools.rows.watermarks import Value, greatest, moved, order_of
from noetl_dagster.worker.execution import Visit

RECOVERY_SECONDS = 120.0
"""Added to the backoff of recovery: for its sensor, which looks every half minute, and for the start of a run."""

PAUSE_SECONDS = (0.02, 1.0)
"""Shortest and longest pause between two looks at the claim of another execution."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """The progress of a playbook in a source.

    Attributes:
        name: the step's, or the ``name`` of its ``state``.
        partition: key of the playbook's partition; empty if it has none.
        value: None if it was reset, so that the next run begins with ``initial``.
        previous: what it was before.
        execution_id: the execution that moved it; None if it was set by hand.
    """

    playbook: str
    name: str
    partition: str
    value: Value | None
    previous: Value | None
    execution_id: int | None
    at: datetime

    @classmethod
    def of(cls, row: Any) -> Watermark:
        """Reads a row of the watermark queries."""
        fields = row["watermark"]
        by_hand = row["execution_id"] == row["event_id"]
        mover = fields.get("of") if by_hand else row["execution_id"]
        return cls(
            playbook=fields["playbook"],
            name=fields["name"],
            partition=fields["partition"],
            value=fields.get("value"),
            previous=fields.get("previous"),
            execution_id=None if mover is None else int(mover),
            at=row["created_at"],
        )


async def entered_watermark(
    runtime: Runtime, claims: WatermarkClaims, visit: Visit, entered: Event
) -> dict[str, Any] | None:
    """Returns a visit's watermark for its ``step.enter``, or None if the step keeps none.

    Waits until no other execution has the watermark, unless the step lets them load side by side.

    Raises:
        TemplateError: ``initial`` or ``name`` cannot be rendered.
        ToolError: ``initial`` is no number, time or text; or another execution has the watermark, and the step says
            ``concurrent: fail``.
    """
    execution, step, spec = visit.execution, visit.step, visit.program.step.state
    logged = execution.state.watermarks.get((step, visit.number))
    if spec is None or (logged is not None and spec.concurrent is ConcurrentRuns.ALLOW):
        return logged
    if logged is not None:
        claimed = await claims.claim(visit, WatermarkKey.of(logged), spec.concurrent)
        # results of an earlier epoch stay, and belong to the value with which it began
        if not claimed.anew or await runtime.reads.fetchval(HAS_RESULTS, *visit.key):
            return logged
    scope = visit.scope(ReferenceCache(), entered)
    fields = {"initial": spec.initial, "name": spec.name}
    try:
        rendered = await render_async(compile_value(fields), scope, runtime.results.get)
    except TemplateError as error:
        raise TemplateError(f"step {step}: state cannot be rendered: {error}") from None
    partition = "" if execution.state.partition is None else execution.state.partition["key"]
    place = WatermarkKey(execution.playbook.metadata.path, str(rendered["name"] or step), partition)
    held = False
    if spec.concurrent is not ConcurrentRuns.ALLOW:
        held = (await claims.claim(visit, place, spec.concurrent)).held
    await runtime.buffer.flush(execution.id)
    row = await runtime.reads.fetchrow(WATERMARK, *place, execution.id)
    latest = {} if row is None else row["watermark"]
    initial = greatest([rendered["initial"]], step)
    value = latest.get("value")
    return {
        **place._asdict(),
        "since": latest.get("since", "0"),
        "value": initial if value is None else value,
        "initial": initial,
        "first": value is None,
        **({"claimed": True} if held else {}),
    }


async def moved_watermark(runtime: Runtime, visit: Visit) -> dict[str, Any] | None:
    """Returns the new watermark of a successful visit, or None if it stays unchanged.

    Raises:
        ToolError: its commands reached values that cannot be compared.
    """
    step = visit.step
    entered = visit.execution.state.watermarks.get((step, visit.number))
    if entered is None:
        return None
    await runtime.buffer.flush(visit.execution.id)
    rows = await runtime.reads.fetch(REACHED, *visit.key)
    watermark = moved(entered, greatest((row["value"] for row in rows), step), step)
    if watermark is not None and visit.program.sink is None:  # its rows are for later steps
        watermark["pending"] = True
    return watermark


async def lost_race(runtime: Runtime, visit: Visit, watermark: dict[str, Any]) -> str | None:
    """Returns a warning if another execution has moved a visit's watermark since it was entered.

    Args:
        watermark: as the visit moves it.
    """
    entered = visit.execution.state.watermarks.get((visit.step, visit.number))
    if entered is None:
        return None
    row = await runtime.reads.fetchrow(WATERMARK_OF_OTHERS, *WatermarkKey.of(entered), visit.execution.id)
    if row is None or row["watermark"].get("since", "0") != entered["since"]:
        return None
    other, began = Watermark.of(row), entered["value"]
    if other.value is None or greatest([began, other.value], visit.step) == began:
        return None
    stands = greatest([other.value, watermark["value"]], visit.step)
    return (
        f"step {visit.step}: execution {other.execution_id} has moved the watermark {other.name!r} to {other.value!r} "
        f"since this one began at {began!r}; it stands at {stands!r}. Both have loaded the rows between; have the sink "
        "upsert, or write state.concurrent: wait"
    )


async def watermarks(pool: asyncpg.Pool[Any], playbook: str) -> list[Watermark]:
    """Returns the watermarks of a playbook, by name and partition."""
    return [Watermark.of(row) for row in await pool.fetch(WATERMARKS, playbook)]


async def set_watermark(
    log: EventLog, playbook: str, name: str, value: Value | None, *, partition: str = ""
) -> Watermark | None:
    """Makes the next run of a step resume from a value, whatever was loaded; None: from ``initial``.

    Returns:
        The watermark before; None if nothing had been loaded.

    Raises:
        ToolError: the watermark before was a number and the value is a text, or the other way round.
    """
    row = await log.pool.fetchrow(WATERMARK, playbook, name, partition, 0)
    before = None if row is None else Watermark.of(row)
    previous = None if before is None else before.value
    if value is not None and previous is not None:
        greatest((value, previous), name)
    fields = {"playbook": playbook, "name": name, "partition": partition, "previous": previous}
    if value is not None:
        fields |= {"value": value, **order_of(value)}
    event = _by_hand(log.ids, fields)
    event.meta["watermark"]["since"] = str(event.event_id)
    await log.append_once(event)
    return before


async def keep_watermarks(connection: Any, pool: asyncpg.Pool[Any], start: int, stop: int) -> None:
    """Rewrites the watermarks that only executions with ids from ``start`` to ``stop`` hold, before their deletion."""
    rows = await connection.fetch(WATERMARKS_BETWEEN, start, stop)
    if not rows:
        return
    log, events = EventLog(pool, Snowflake(await connection.fetchval(NEXT_NODE))), []
    for row in rows:
        watermark = Watermark.of(row)
        fields = {name: value for name, value in row["watermark"].items() if name != "pending"}
        if watermark.execution_id is not None:
            fields["of"] = str(watermark.execution_id)
        events.append(_by_hand(log.ids, fields))
        events[-1].created_at = watermark.at
    await log.append(events, connection=connection)


def _by_hand(ids: Snowflake, fields: dict[str, Any]) -> Event:
    """Makes an event that belongs to no execution."""
    event_id, type_ = ids.next(), EventType.STATE_SET
    event = Event(event_id, event_id, type_, node_name=fields["name"], status="COMPLETED")
    event.meta["watermark"] = fields
    return event


class WatermarkKey(NamedTuple):
    """The name of a watermark: the playbook's path, the step's or given name, and the partition or an empty text."""

    playbook: str
    name: str
    partition: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> WatermarkKey:
        """Returns the place of a watermark in the log."""
        return cls(*(fields[field] for field in cls._fields))


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
        ancestors, parent = [], state.parent_execution_id
        while parent is not None:
            ancestors.append(parent)
            parent = (await self._runtime.state(parent, connection)).parent_execution_id
        return ancestors

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
