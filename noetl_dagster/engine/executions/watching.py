"""The state of an execution for people who watch it, now or as it was at an event, and what has changed meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.engine.executions.overview import LoopView, StepView, loop_view, step_views
from noetl_dagster.engine.executions.progress import loop_rates
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.commit_order import horizon
from noetl_dagster.events.projection import execution_at, read_execution
from noetl_dagster.events.projection_row import ProjectedExecution
from noetl_dagster.events.queries import STATE_EVENTS
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.types import EventType

MOST_VISITS = 300
"""Visits that are kept, the latest ones."""

MOST_EVENTS = 40
"""Events that are kept for display, the latest ones."""

MOST_SLOW = 10
"""Iterations that are kept as the slowest ones."""

SLOW_SECONDS = 0.1
"""Iterations that took as long are found by an index, ``idx_event_slow``."""

_LAST = 2**63 - 1

_OF_VISITS = frozenset(
    {
        EventType.STEP_ENTER,
        EventType.STEP_EXIT,
        EventType.STEP_SKIPPED,
        EventType.LOOP_STARTED,
        EventType.LOOP_FANOUT_STARTED,
    }
)

LATEST_CHANGES = f"""
SELECT event_id, event_type, node_name, status, meta, error, created_at, NULL::int AS current_index FROM noetl.event
WHERE execution_id = $1 AND event_id <= $2 AND {STATE_EVENTS} AND ($4::text IS NULL OR node_name = $4)
ORDER BY event_id DESC LIMIT $3
"""

# The slowest iterations of each step, in the order of the index idx_event_slow.
SLOWEST = f"""
SELECT one.* FROM unnest($3::text[]) AS step (name) CROSS JOIN LATERAL (
    SELECT node_name, COALESCE((meta ->> 'visit')::int, 1) AS visit, current_index, duration, created_at
    FROM noetl.event
    WHERE execution_id = $1 AND node_name = step.name AND duration >= {SLOW_SECONDS} AND meta ? 'loop_id'
      AND NOT meta ? 'part' AND event_id <= $2 AND current_index IS NOT NULL
    ORDER BY duration DESC, event_id DESC LIMIT {MOST_SLOW}
) one ORDER BY one.duration DESC LIMIT {MOST_SLOW}
"""


@dataclass(slots=True)
class StepVisit:
    """One visit of a step, and its loop if it has one.

    Attributes:
        started: None if it has not begun.
        ended: None while it is open.
        asset: key of the asset that it made.
        loop_ids: of the starts of its loop; a resumed one has several.
        total: number of items; 0 while it is not known.
    """

    step: str
    visit: int
    started: datetime | None = None
    ended: datetime | None = None
    status: str = "RUNNING"
    error: str | None = None
    asset: str | None = None
    loop_ids: tuple[str, ...] = ()
    total: int = 0
    mode: str = ""
    is_fanout: bool = False

    @property
    def success(self) -> EventType:
        """The event by which an iteration succeeds."""
        return EventType.LOOP_SHARD_DONE if self.is_fanout else EventType.COMMAND_COMPLETED

    @property
    def failure(self) -> EventType:
        """The event by which an iteration, or an attempt of it, fails."""
        return EventType.LOOP_SHARD_FAILED if self.is_fanout else EventType.COMMAND_FAILED


class SlowIteration(NamedTuple):
    """A slow iteration, and its duration in seconds."""

    seconds: float
    step: str
    visit: int
    iteration: int
    ended: datetime


@dataclass(slots=True)
class ShownEvent:
    """An event, as a list shows it."""

    event_id: int
    event_type: str
    step: str
    status: str | None
    index: int | None
    visit: int
    attempt: int | None
    error: str | None
    at: datetime

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ShownEvent:
        """Makes one from a row."""
        meta = row["meta"] or {}
        return cls(
            event_id=row["event_id"],
            event_type=row["event_type"],
            step=row["node_name"] or "",
            status=row["status"],
            index=row["current_index"],
            visit=int(meta.get("visit", 1)),
            attempt=meta.get("attempt"),
            error=row["error"],
            at=row["created_at"],
        )


@dataclass(slots=True)
class WatchedExecution:
    """The state of an execution.

    Attributes:
        row: status, steps and counts of loops.
        position: every transaction below this number is in the state, and nothing can appear there later. It also has
            what was committed while an older transaction runs.
        visits: the latest visits, in the order of their starts, by step and number.
        events: the latest events that changed something, the oldest first.
        slowest: the slowest iterations so far, the slowest first.
        rates: by loop id, iterations that ended per second lately.
    """

    row: ProjectedExecution
    position: int
    visits: dict[tuple[str, int], StepVisit] = field(default_factory=dict)
    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    slowest: list[SlowIteration] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    async def read(cls, pool: asyncpg.Pool, execution_id: int, *, until: int | None = None) -> WatchedExecution:
        """Reads an execution, in a few milliseconds however long its log is.

        Args:
            until: an event id: reads the state that the execution had at this event, in the order of event ids.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        position = (await horizon(pool)).xact_id
        row = await (read_execution(pool, execution_id) if until is None else execution_at(pool, execution_id, until))
        if row is None:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        watched, last = cls(row, position), _LAST if until is None else until
        changes = await pool.fetch(LATEST_CHANGES, execution_id, last, 3 * MOST_VISITS, None)
        watched.visits = _visits_of(reversed(changes))
        watched.events.extend(map(ShownEvent.of, reversed(changes[:MOST_EVENTS])))
        loops = [*row.state.get("loop", {}), *row.state.get("fanout", {})]
        watched.slowest = [
            SlowIteration(one["duration"], one["node_name"], one["visit"], one["current_index"], one["created_at"])
            for one in await pool.fetch(SLOWEST, execution_id, last, loops)
        ]
        if until is None and row.status == ExecutionStatus.RUNNING and row.has_open_loop:
            watched.rates = await loop_rates(pool, execution_id)
        return watched

    @property
    def id(self) -> int:
        """The id of the execution."""
        return self.row.execution_id

    @property
    def is_running(self) -> bool:
        """True until the execution ends."""
        return self.row.status == ExecutionStatus.RUNNING

    def loop_of(self, step: str) -> LoopView | None:
        """Returns the counts of the latest loop or fan-out of a step."""
        return loop_view(self.row.state, step, self.rates if self.is_running else {})

    def steps(self) -> list[StepView]:
        """Returns the steps in the order of their first visits."""
        return step_views(self.row, self.rates if self.is_running else {})


async def visits_of_step(pool: asyncpg.Pool, execution_id: int, step: str) -> list[StepVisit]:
    """Returns the latest visits of a step, the first of them first."""
    changes = await pool.fetch(LATEST_CHANGES, execution_id, _LAST, 3 * MOST_VISITS, step)
    return sorted(_visits_of(reversed(changes)).values(), key=lambda one: one.visit)


def _visits_of(changes: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], StepVisit]:
    """Returns visits, the latest ones, in the order of their starts, by step and number."""
    visits: dict[tuple[str, int], StepVisit] = {}
    for event in changes:
        type_, meta = event["event_type"], event["meta"] or {}
        if type_ not in _OF_VISITS:
            continue
        key = event["node_name"], int(meta.get("visit", 1))
        visit = visits.setdefault(key, StepVisit(*key, event["created_at"]))
        if type_ == EventType.STEP_ENTER:
            visit.ended, visit.status, visit.error = None, "RUNNING", None
        elif type_ in (EventType.STEP_EXIT, EventType.STEP_SKIPPED):
            visit.ended, visit.status, visit.error = event["created_at"], event["status"] or "SKIPPED", event["error"]
            visit.asset = meta.get("asset") if event["status"] == "COMPLETED" else None
        else:
            visit.loop_ids = (*visit.loop_ids, meta["loop_id"])
            visit.total = int(meta.get("total_shards") or meta.get("collection_size") or visit.total)
            visit.mode = meta.get("mode") or visit.mode
            visit.is_fanout = type_ == EventType.LOOP_FANOUT_STARTED
    for key in list(visits)[:-MOST_VISITS]:
        del visits[key]
    return visits


async def changes_between(pool: asyncpg.Pool, execution_id: int, first: int, end: int) -> list[ShownEvent]:
    """Returns the events that changed something in transactions from ``first`` up to, without, ``end``."""
    rows = await pool.fetch(queries.SHOWN_BETWEEN, execution_id, str(first), str(end))
    return [ShownEvent.of(row) for row in rows]
