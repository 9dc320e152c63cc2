"""The state of an execution for people who watch it, kept up to date in the order of commits.

A :class:`WatchedExecution` is read once; each later :meth:`WatchedExecution.advance` is one statement, however many
people look at it. Its position is a transaction: everything below is in it, and nothing can appear there later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.engine.executions.overview import OPEN, LoopView, loop_view
from noetl_dagster.engine.executions.progress import Pace, loop_rates
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.projection import read_execution
from noetl_dagster.events.projection_row import Done, ProjectedExecution
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

LATEST_CHANGES = f"""
SELECT event_id, event_type, node_name, status, meta, error, created_at, NULL::int AS current_index FROM noetl.event
WHERE execution_id = $1 AND event_id <= $2 AND {STATE_EVENTS}
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
    """One visit of a step. ``ended`` is None while it is open; ``asset`` is the key of the asset that it made."""

    step: str
    visit: int
    started: datetime
    ended: datetime | None = None
    status: str = "RUNNING"
    asset: str | None = None


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
    """The state of an execution at a position in the log.

    Attributes:
        row: status, steps and counts of loops.
        position: every transaction below this number is in the state.
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
    _paces: dict[str, Pace] = field(default_factory=dict)

    @classmethod
    async def read(
        cls, pool: asyncpg.Pool, execution_id: int, *, until: int | None = None, to_advance: bool = True
    ) -> WatchedExecution:
        """Reads an execution.

        Args:
            until: an event id: reads the state that the execution had at this event, in the order of event ids.
            to_advance: the row is that of the position. Otherwise it also has what was committed while an older
                transaction runs, and must not be advanced.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        last = _LAST if until is None else until
        if until is None:
            watched = await cls._read_latest(pool, execution_id)
            if not to_advance:
                watched.row = await read_execution(pool, execution_id) or watched.row
        else:
            watched = cls(ProjectedExecution(execution_id), 0)
            counted = await pool.fetch(queries.DONE_UNTIL, execution_id, until)
            done = {(one["node_name"], one["visit"]): one["done"] for one in counted}
            watched.row.apply(await pool.fetch(queries.EVENTS_UNTIL, execution_id, until), done)
        row = watched.row
        if row.created_at is None:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        watched.visits.clear()
        watched.events.clear()
        for event in reversed(await pool.fetch(LATEST_CHANGES, execution_id, last, 3 * MOST_VISITS)):
            watched._visit(event)
            watched.events.append(ShownEvent.of(event))
        watched.slowest = [
            _slow(one) for one in await pool.fetch(SLOWEST, execution_id, last, list(watched._loops_by_step()))
        ]
        if until is None and row.status == ExecutionStatus.RUNNING and row.has_open_loop:
            watched.rates = await loop_rates(pool, execution_id)
        return watched

    @classmethod
    async def _read_latest(cls, pool: asyncpg.Pool, execution_id: int) -> WatchedExecution:
        """Reads the stored row, and what was committed since its checkpoint."""
        stored = dict(await pool.fetchrow(queries.ROW_AND_CHECKPOINT, execution_id))
        checkpoint = int(stored.pop("checkpoint") or 0)
        del stored["has_tail"]
        is_stored = stored["execution_id"] is not None
        watched = cls(ProjectedExecution(**stored) if is_stored else ProjectedExecution(execution_id), checkpoint)
        await watched.advance(pool)
        if watched.row.created_at is None:  # its first transaction is above the horizon: to apply it twice is harmless
            first = await pool.fetch(queries.EVENTS_UNTIL, execution_id, _LAST)
            watched.row.apply([one for one in first if one["event_type"] == EventType.PLAYBOOK_INITIALIZED], {})
        return watched

    @property
    def id(self) -> int:
        """The id of the execution."""
        return self.row.execution_id

    @property
    def is_running(self) -> bool:
        """True until the execution ends."""
        return self.row.status == ExecutionStatus.RUNNING

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end, or to now."""
        if self.row.start_time is None:
            return 0.0
        return ((self.row.end_time or datetime.now(UTC)) - self.row.start_time).total_seconds()

    async def advance(self, pool: asyncpg.Pool) -> list[ShownEvent]:
        """Applies what was committed since, with one statement; returns its events in the order of their commits."""
        rows = await pool.fetch(queries.CHANGES_SINCE, self.id, str(self.position))
        self.position = int(rows[0]["horizon"])
        changes = [row for row in rows if row["event_id"] is not None]
        done: Done = {}
        for row in rows:
            if row["event_id"] is None and row["done"]:
                done[(row["node_name"], row["visit"])] = row["done"]
                self._see_slow(row)
        self.row.apply([row for row in changes if row["is_change"]], done)
        shown = [ShownEvent.of(row) for row in changes]
        for row in changes:
            self._visit(row)
        shown_ids = {one.event_id for one in self.events}  # it was read with events above the horizon
        self.events.extend(one for one in shown if one.event_id not in shown_ids)
        self._see_pace()
        return shown

    def loop_of(self, step: str) -> LoopView | None:
        """Returns the counts of the latest loop or fan-out of a step."""
        return loop_view(self.row.state, step, self.rates if self.is_running else {})

    def steps(self) -> Iterable[dict[str, Any]]:
        """Returns the steps in the order of their first visits, with ``step``, ``status`` and ``visits``."""
        stopped = self.row.status == ExecutionStatus.FAILED
        for step in self.row.state.get("steps", []):
            is_open = stopped and step["status"] == ExecutionStatus.RUNNING
            yield {**step, "status": OPEN} if is_open else step

    def _visit(self, event: Mapping[str, Any]) -> None:
        type_, step = event["event_type"], event["node_name"]
        number = int((event["meta"] or {}).get("visit", 1))
        if type_ == EventType.STEP_ENTER:
            visit = self.visits.setdefault((step, number), StepVisit(step, number, event["created_at"]))
            visit.ended, visit.status = None, "RUNNING"
        elif type_ in (EventType.STEP_EXIT, EventType.STEP_SKIPPED):
            visit = self.visits.setdefault((step, number), StepVisit(step, number, event["created_at"]))
            visit.ended, visit.status = event["created_at"], event["status"] or "SKIPPED"
            visit.asset = event["meta"].get("asset") if event["status"] == "COMPLETED" else None
        while len(self.visits) > MOST_VISITS:
            del self.visits[next(iter(self.visits))]

    def _loops_by_step(self) -> dict[str, dict[str, Any]]:
        return {**self.row.state.get("loop", {}), **self.row.state.get("fanout", {})}

    def _see_slow(self, row: Mapping[str, Any]) -> None:
        if row["duration"] is not None and row["current_index"] is not None:
            self.slowest = sorted({*self.slowest, _slow(row)}, reverse=True)[:MOST_SLOW]

    def _see_pace(self) -> None:
        now = time.monotonic()
        for entry in self._loops_by_step().values():
            loop_id = entry["loop_id"]
            if entry["completed"] or not self.is_running:
                self._paces.pop(loop_id, None)
                self.rates.pop(loop_id, None)
                continue
            pace = self._paces.setdefault(loop_id, Pace())
            pace.see(entry["done"] + entry["failed"], now)
            if pace.rate:
                self.rates[loop_id] = pace.rate


def _slow(row: Mapping[str, Any]) -> SlowIteration:
    return SlowIteration(row["duration"], row["node_name"], row["visit"], row["current_index"], row["created_at"])


async def changes_between(pool: asyncpg.Pool, execution_id: int, first: int, end: int) -> list[ShownEvent]:
    """Returns the events that changed something in transactions from ``first`` up to, without, ``end``."""
    rows = await pool.fetch(queries.SHOWN_BETWEEN, execution_id, str(first), str(end))
    return [ShownEvent.of(row) for row in rows]
