"""The iterations of a loop or fan-out, of which there may be millions: pages of them, groups of failures, durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.engine.executions.listing import QUERY_SECONDS
from noetl_dagster.engine.executions.watching import SLOW_SECONDS, StepVisit
from noetl_dagster.events.log import as_event
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.types import Event, EventType

MOST_FAILURES = 10_000
"""Failures that are grouped, those with the smallest indexes."""

SAMPLE = 10_000
"""Iterations whose durations are counted; of larger loops, slices that are spread evenly."""

SLICES = 40

MOST_ATTEMPTS = 100
"""Attempts of a command that is no iteration that are looked for."""

MOST_EVENTS = 1_000

BINS_PER_DECADE = 3

_LIST = ", ".join(COLUMNS)
_FINAL = "COALESCE(meta ->> 'final', 'true') = 'true'"
_OF_LOOP = "execution_id = $1 AND meta ? 'loop_id' AND meta ->> 'loop_id' = ANY($2::text[])"
_STATES = """('command.issued', 'command.claimed', 'command.completed', 'command.failed',
    'loop.shard.done', 'loop.shard.failed')"""

# The latest event of each iteration that tells its state, and its item.
_LATEST = f"""
SELECT DISTINCT ON (current_index) current_index, event_type, duration, left(error, 500) AS error, worker_id,
       created_at,
       COALESCE((meta ->> 'attempt')::int, 1) AS attempt, meta ? 'part' AS is_part,
       {_FINAL} AS final
FROM noetl.event
WHERE {_OF_LOOP} AND event_type IN {_STATES} AND current_index = ANY($3::int[])
ORDER BY current_index, event_id DESC
"""
_ITEMS = f"""
SELECT DISTINCT ON (current_index) current_index, left(current_item::text, 300) AS item FROM noetl.event
WHERE {_OF_LOOP} AND event_type IN ('loop.item', 'loop.shard.enqueued') AND current_index = ANY($3::int[])
ORDER BY current_index, event_id DESC
"""

_LOOPS = "FROM unnest($2::text[]) AS loop (id) CROSS JOIN LATERAL"
_OF_ONE = "execution_id = $1 AND meta ? 'loop_id' AND meta ->> 'loop_id' = loop.id"
_NO_SUCCESS = """
NOT EXISTS (SELECT FROM unnest($2::text[]) AS own (id) JOIN noetl.event done ON done.meta ->> 'loop_id' = own.id
    WHERE done.execution_id = $1 AND done.meta ? 'loop_id' AND done.event_type = $4
      AND done.current_index = event.current_index AND NOT done.meta ? 'part')"""


def _indexes(condition: str, limit: int) -> str:
    """Returns SQL for the first indexes, from one on, of iterations with an event that fulfils a condition.

    It reads one type of event of one loop id after the other, in the order of the index ``idx_event_loop_id_type``, so
    that it stops after a page. ``limit`` is the number of its last parameter.
    """
    return f"""
SELECT DISTINCT one.current_index {_LOOPS} (
    SELECT DISTINCT current_index FROM noetl.event
    WHERE {_OF_ONE} AND current_index >= $3 AND {condition}
    ORDER BY current_index LIMIT ${limit}
) one ORDER BY one.current_index LIMIT ${limit}
"""


_FAILED = _indexes(
    f"""event_type = $5 AND {_FINAL} AND ($6::text IS NULL OR position(lower($6) IN lower(error)) > 0)
      AND {_NO_SUCCESS}""",
    7,
)
_COMPLETED = _indexes("event_type = $4 AND NOT meta ? 'part' AND ($5::float8 IS NULL OR duration >= $5)", 6)
_UNENDED = _indexes(
    f"""event_type = 'command.issued' AND {_NO_SUCCESS}
      AND NOT EXISTS (SELECT FROM noetl.event failed
        WHERE failed.execution_id = $1 AND failed.meta ? 'loop_id' AND failed.meta ->> 'loop_id' = loop.id
          AND failed.event_type = $5 AND failed.current_index = event.current_index
          AND COALESCE(failed.meta ->> 'final', 'true') = 'true')""",
    6,
)
_ALL = _indexes("event_type = 'command.issued'", 4)
_SLOWEST = f"""
SELECT current_index, duration, event_id FROM noetl.event
WHERE execution_id = $1 AND node_name = $2 AND duration >= {SLOW_SECONDS} AND meta ? 'loop_id'
  AND meta ->> 'loop_id' = ANY($3::text[]) AND NOT meta ? 'part' AND (duration, event_id) < ($4, $5) AND duration >= $6
  AND event_type = ANY($7::text[]) AND ($8::text IS NULL OR position(lower($8) IN lower(error)) > 0)
ORDER BY duration DESC, event_id DESC LIMIT $9
"""

_FAILURE_GROUPS = f"""
SELECT error, count(*) AS number, min(current_index) AS first {_LOOPS} (
    SELECT current_index, left(regexp_replace(left(error, 400), '[0-9]+', '#', 'g'), 200) AS error FROM noetl.event
    WHERE {_OF_ONE} AND event_type = $3 AND {_FINAL} AND {_NO_SUCCESS}
    ORDER BY current_index LIMIT {MOST_FAILURES}
) failed GROUP BY error ORDER BY number DESC, first LIMIT 20
"""

_DURATIONS = f"""
SELECT floor({BINS_PER_DECADE} * log(greatest(ended.duration, 0.0001)))::int AS bin, count(*) AS number
FROM unnest($4::int[]) AS slice (first) CROSS JOIN unnest($2::text[]) AS loop (id) CROSS JOIN LATERAL (
    SELECT duration FROM noetl.event
    WHERE {_OF_ONE} AND event_type = $3 AND current_index >= slice.first AND current_index < slice.first + $5
      AND duration IS NOT NULL AND NOT meta ? 'part'
    LIMIT {2 * SAMPLE}  -- so that each slice is one search of the index
) ended GROUP BY bin ORDER BY bin
"""

# The start of a loop has the index 0 too.
_OF_ITERATION = f"""
SELECT {_LIST} FROM noetl.event
WHERE {_OF_LOOP} AND current_index = $3 AND event_type NOT IN ('loop.started', 'loop.fanout.started')
ORDER BY event_id LIMIT $4
"""

# Commands that are no iterations are found by their names, which are in three indexes.
_OF_COMMANDS = f"""
SELECT {_LIST} FROM (
    SELECT * FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'command_id' = ANY($2) AND meta ? 'command_id'
      AND event_type = 'command.issued'
    UNION ALL
    SELECT * FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'command_id' = ANY($2)
      AND event_type IN ('command.claimed', 'command.heartbeat')
    UNION ALL
    SELECT * FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'command_id' = ANY($2) AND meta ? 'command_id'
      AND event_type IN ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
) found ORDER BY event_id LIMIT $3
"""


class IterationState(StrEnum):
    """The state of an iteration."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    RETRYING = "RETRYING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class IterationFilter:
    """Which iterations are wanted.

    Attributes:
        state: ``failed``, ``completed``, ``open`` (not ended), or empty for any.
        error: a text in the error of failed ones, in any case.
        slower: least duration in seconds.
        first: smallest index.
        slowest_first: by duration, of those that took :data:`SLOW_SECONDS` or more; otherwise by index.
        after: with ``slowest_first``, the duration and event id of the last one of the page before.
    """

    state: str = ""
    error: str | None = None
    slower: float | None = None
    first: int = 0
    slowest_first: bool = False
    after: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration. ``seconds`` is the duration of its latest attempt, ``at`` the time of its latest event."""

    index: int
    state: IterationState
    attempt: int
    seconds: float | None
    error: str | None
    worker: str | None
    at: datetime
    item: str | None


@dataclass(frozen=True, slots=True)
class IterationPage:
    """A page of iterations. ``next``: the filter of the page after it; None if there is none."""

    rows: list[Iteration]
    next: IterationFilter | None = None


class FailureGroup(NamedTuple):
    """Failed iterations whose errors are the same but for numbers; ``first`` is the smallest index."""

    error: str
    number: int
    first: int


@dataclass(frozen=True, slots=True)
class Durations:
    """How long iterations took: ranges in seconds with their numbers. ``sampled``: of a part of the loop."""

    bins: list[tuple[float, float, int]]
    sampled: bool


async def list_iterations(
    pool: asyncpg.Pool, execution_id: int, step: str, visit: StepVisit, wanted: IterationFilter, limit: int
) -> IterationPage:
    """Returns a page of the iterations of a loop.

    Raises:
        TimeoutError: the filter matches too little of a large loop.
    """
    following: IterationFilter | None = None
    if wanted.slowest_first:
        duration, event_id = wanted.after or (float("inf"), 2**63 - 1)
        least = max(wanted.slower or 0.0, SLOW_SECONDS)
        types = {"failed": [visit.failure], "completed": [visit.success]}.get(
            wanted.state, [visit.success, visit.failure]
        )
        values = (execution_id, step, list(visit.loop_ids), duration, event_id, least, types, wanted.error)
        slowest = await pool.fetch(_SLOWEST, *values, limit + 1, timeout=QUERY_SECONDS)
        if len(slowest) > limit:
            last = slowest[limit - 1]
            following = replace(wanted, after=(last["duration"], last["event_id"]))
        indexes = list(dict.fromkeys(row["current_index"] for row in slowest[:limit]))
    else:
        indexes = await _chosen(pool, execution_id, visit, wanted, limit + 1)
        if len(indexes) > limit:
            following = replace(wanted, first=indexes[limit])
            indexes = indexes[:limit]
    return IterationPage(await _iterations(pool, execution_id, visit, indexes), following)


async def _chosen(
    pool: asyncpg.Pool, execution_id: int, visit: StepVisit, wanted: IterationFilter, limit: int
) -> list[int]:
    success, failure = visit.success.value, visit.failure.value
    state = wanted.state or ("failed" if wanted.error else "completed" if wanted.slower is not None else "")
    query: str
    own: tuple[Any, ...]
    match state:
        case "failed":
            query, own = _FAILED, (success, failure, wanted.error)
        case "open":
            query, own = _UNENDED, (success, failure)
        case "completed":
            query, own = _COMPLETED, (success, wanted.slower)
        case _:
            query, own = _ALL, ()
    values = (execution_id, list(visit.loop_ids), wanted.first, *own, limit)
    rows = await pool.fetch(query, *values, timeout=QUERY_SECONDS)
    return [row["current_index"] for row in rows]


async def _iterations(
    pool: asyncpg.Pool, execution_id: int, visit: StepVisit, indexes: Sequence[int]
) -> list[Iteration]:
    values = (execution_id, list(visit.loop_ids), list(indexes))
    latest = {row["current_index"]: row for row in await pool.fetch(_LATEST, *values)}
    items = {row["current_index"]: row["item"] for row in await pool.fetch(_ITEMS, *values)}
    return [
        Iteration(
            index=index,
            state=_state_of(row),
            attempt=row["attempt"],
            seconds=row["duration"],
            error=row["error"],
            worker=row["worker_id"],
            at=row["created_at"],
            item=items.get(index),
        )
        for index in indexes
        if (row := latest.get(index)) is not None
    ]


def _state_of(row: Any) -> IterationState:
    type_ = row["event_type"]
    if type_ == EventType.COMMAND_ISSUED:
        return IterationState.WAITING if row["attempt"] == 1 else IterationState.RETRYING
    if type_ == EventType.COMMAND_CLAIMED or row["is_part"]:
        return IterationState.RUNNING
    if type_ in (EventType.COMMAND_COMPLETED, EventType.LOOP_SHARD_DONE):
        return IterationState.COMPLETED
    return IterationState.FAILED if row["final"] else IterationState.RETRYING


async def failure_groups(pool: asyncpg.Pool, execution_id: int, visit: StepVisit) -> list[FailureGroup]:
    """Returns the failed iterations of a loop by error, the most frequent first; of :data:`MOST_FAILURES` at most."""
    loops = list(visit.loop_ids)
    values = (execution_id, loops, visit.failure.value, visit.success.value)
    rows = await pool.fetch(_FAILURE_GROUPS, *values, timeout=QUERY_SECONDS)
    return [FailureGroup(row["error"] or "", row["number"], row["first"]) for row in rows]


async def durations(pool: asyncpg.Pool, execution_id: int, visit: StepVisit, size: int) -> Durations:
    """Returns how long the completed iterations of a loop took; ``size`` is the number of its iterations."""
    sampled = size > SAMPLE
    width = SAMPLE // SLICES if sampled else max(size, 1)
    firsts = [round(place * (size - width) / (SLICES - 1)) for place in range(SLICES)] if sampled else [0]
    values = (execution_id, list(visit.loop_ids), visit.success.value, firsts, width)
    rows = await pool.fetch(_DURATIONS, *values, timeout=QUERY_SECONDS)
    counts = {row["bin"]: row["number"] for row in rows}
    if not counts:
        return Durations([], sampled)
    bounds = [10 ** (number / BINS_PER_DECADE) for number in range(min(counts), max(counts) + 2)]
    numbers = [counts.get(number, 0) for number in range(min(counts), max(counts) + 1)]
    return Durations(list(zip(bounds, bounds[1:], numbers, strict=False)), sampled)


async def events_of_iteration(
    pool: asyncpg.Pool, execution_id: int, visit: StepVisit, index: int, *, most: int = MOST_EVENTS
) -> list[Event]:
    """Returns the events of one iteration, the oldest first; none if the loop has no such iteration yet."""
    values = (execution_id, list(visit.loop_ids), index, most)
    return [as_event(row) for row in await pool.fetch(_OF_ITERATION, *values, timeout=QUERY_SECONDS)]


async def events_of_command(pool: asyncpg.Pool, execution_id: int, step: str, visit: int) -> list[Event]:
    """Returns the events of the commands of a visit without a loop, the oldest first."""
    names = [f"{execution_id}:{step}:{visit}:{attempt}" for attempt in range(1, MOST_ATTEMPTS + 1)]
    rows = await pool.fetch(_OF_COMMANDS, execution_id, names, MOST_EVENTS, timeout=QUERY_SECONDS)
    return [as_event(row) for row in rows]
