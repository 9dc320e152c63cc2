"""Watermarks of steps (``state``): their values when a visit begins and when it ends.

The log is the only truth: a watermark is the greatest value that counts, so a slower execution never turns it back.
Setting it by hand discards earlier progress, also that of executions that had begun before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.watermark_claims import WatermarkClaims, WatermarkKey
from noetl_dagster.errors import TemplateError
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.queries import (
    HAS_RESULTS,
    NEXT_NODE,
    REACHED,
    WATERMARK,
    WATERMARK_OF_OTHERS,
    WATERMARKS,
    WATERMARKS_BETWEEN,
)
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import ConcurrentRuns
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.tools.rows.watermarks import Value, greatest, moved, order_of
from noetl_dagster.worker.execution import Visit


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
        kept = row["watermark"]
        by_hand = row["execution_id"] == row["event_id"]
        mover = kept.get("of") if by_hand else row["execution_id"]
        return cls(
            playbook=kept["playbook"],
            name=kept["name"],
            partition=kept["partition"],
            value=kept.get("value"),
            previous=kept.get("previous"),
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
    known = execution.state.watermarks.get((step, visit.number))
    if spec is None or (known is not None and spec.concurrent is ConcurrentRuns.ALLOW):
        return known
    if known is not None:
        claimed = await claims.claim(visit, WatermarkKey.of(known), spec.concurrent)
        # results of an earlier epoch stay, and belong to the value with which it began
        if not claimed.anew or await runtime.reads.fetchval(HAS_RESULTS, *visit.key):
            return known
    scope = visit.scope(ReferenceCache(), entered)
    fields = {"initial": spec.initial, "name": spec.name}
    try:
        rendered = await render_async(compile_value(fields), scope, runtime.results.get)
    except TemplateError as error:
        raise TemplateError(f"step {step}: state cannot be settled: {error}") from None
    partition = "" if execution.state.partition is None else execution.state.partition["key"]
    place = WatermarkKey(execution.playbook.metadata.path, str(rendered["name"] or step), partition)
    held = False
    if spec.concurrent is not ConcurrentRuns.ALLOW:
        held = (await claims.claim(visit, place, spec.concurrent)).held
    await runtime.buffer.flush()
    row = await runtime.reads.fetchrow(WATERMARK, *place, execution.id)
    kept = {} if row is None else row["watermark"]
    initial = greatest([rendered["initial"]], step)
    value = kept.get("value")
    return {
        **place._asdict(),
        "since": kept.get("since", "0"),
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
    kept = visit.execution.state.watermarks.get((step, visit.number))
    if kept is None:
        return None
    await runtime.buffer.flush()
    rows = await runtime.reads.fetch(REACHED, *visit.key)
    watermark = moved(kept, greatest((row["value"] for row in rows), step), step)
    if watermark is not None and visit.program.sink is None:  # its rows are for later steps
        watermark["pending"] = True
    return watermark


async def lost_race(runtime: Runtime, visit: Visit, watermark: dict[str, Any]) -> str | None:
    """Returns a warning if another execution has moved a visit's watermark since it was entered.

    Args:
        watermark: as the visit moves it.
    """
    kept = visit.execution.state.watermarks.get((visit.step, visit.number))
    if kept is None:
        return None
    row = await runtime.reads.fetchrow(WATERMARK_OF_OTHERS, *WatermarkKey.of(kept), visit.execution.id)
    if row is None or row["watermark"].get("since", "0") != kept["since"]:
        return None
    other, began = Watermark.of(row), kept["value"]
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
    kept = {"playbook": playbook, "name": name, "partition": partition, "previous": previous}
    if value is not None:
        kept |= {"value": value, **order_of(value)}
    event = _by_hand(log.ids, kept)
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
        known = Watermark.of(row)
        kept = {name: value for name, value in row["watermark"].items() if name != "pending"}
        if known.execution_id is not None:
            kept["of"] = str(known.execution_id)
        events.append(_by_hand(log.ids, kept))
        events[-1].created_at = known.at
    await log.append(events, connection=connection)


def _by_hand(ids: Snowflake, kept: dict[str, Any]) -> Event:
    """Makes an event that belongs to no execution."""
    event_id, type_ = ids.next(), EventType.STATE_SET
    event = Event(event_id, event_id, type_, node_name=kept["name"], status="COMPLETED")
    event.meta["watermark"] = kept
    return event
