"""Compares two executions: their workloads, their steps, and the first visit in which their courses differ."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

import asyncpg
import orjson

from noetl_dagster.engine.executions.overview import OPEN
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.projection import read_execution
from noetl_dagster.events.projection_row import ProjectedExecution
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.types import EventType

MOST_EVENTS = 5_000
"""Ends and beginnings of visits that are read of an execution."""

MOST_VALUES = 200
"""Values of the workloads that are shown as different."""

MOST_BYTES = 1_000_000
"""Size of a workload that is compared."""

LONGEST_VALUE = 500
LONGEST_ERROR = 300

# The text that an execution runs and its input, without an input that is large.
STARTED = f"""
SELECT event.node_name AS playbook, COALESCE(catalog.path, event.context ->> 'path') AS path, catalog.version,
       CASE WHEN octet_length(event.context ->> 'workload') < {MOST_BYTES}
            THEN event.context -> 'workload' END AS workload
FROM noetl.event LEFT JOIN noetl.catalog USING (catalog_id)
WHERE event.execution_id = $1 AND event.event_type = 'playbook.initialized'
ORDER BY event.event_id LIMIT 1
"""

# The beginnings and ends of visits, in order, without results.
COURSE = f"""
SELECT event_type, node_name AS step, COALESCE((meta ->> 'visit')::int, 1) AS visit, status, created_at,
       meta -> 'fired' AS fired, left(error, {LONGEST_ERROR}) AS error
FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('step.enter', 'step.exit')
ORDER BY event_id LIMIT {MOST_EVENTS}
"""


_ENDINGS = {
    ExecutionStatus.RUNNING: "still runs",
    ExecutionStatus.COMPLETED: "completed",
    ExecutionStatus.FAILED: "failed",
    ExecutionStatus.CANCELLED: "was cancelled",
}


@dataclass(slots=True)
class VisitCourse:
    """One visit of a step.

    Attributes:
        status: how it ended; empty while it is open.
        fired: the steps to which its arcs led.
    """

    step: str
    visit: int
    started: datetime
    ended: datetime | None = None
    status: str = ""
    fired: tuple[str, ...] = ()
    error: str | None = None

    @property
    def name(self) -> str:
        """Names it in a sentence: ``step load``, ``visit 2 of step load``."""
        return f"step {self.step}" if self.visit == 1 else f"visit {self.visit} of step {self.step}"


Course = dict[tuple[str, int], VisitCourse]
"""The visits of an execution by step and number, in the order of their beginnings."""


@dataclass(frozen=True, slots=True)
class StepCourse:
    """The latest visit of a step, and the time of all its visits.

    Attributes:
        status: as in an overview; ``OPEN`` for a step without an end in a failed execution.
        total: number of a loop's items; None without a loop. ``done`` and ``failed`` are iterations.
        seconds: from the beginnings to the ends of its visits, or to now.
    """

    status: str
    visits: int
    total: int | None = None
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    error: str | None = None

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What is compared: everything but the time and the words of an error."""
        return self.status, self.visits, self.total, self.done, self.failed


@dataclass(frozen=True, slots=True)
class ComparedExecution:
    """One of two executions.

    Attributes:
        path: catalog path of its playbook.
        version: number of the text that it runs, if that is registered.
        workload: None if it is too large to be compared.
        seconds: from the start to the end, or to now.
        steps: in the order of their first visits.
        is_whole: the course has every visit.
    """

    execution_id: int
    playbook: str
    path: str
    version: int | None
    status: str
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float
    error: str | None
    workload: dict[str, Any] | None
    steps: dict[str, StepCourse]
    course: Course
    is_whole: bool

    @property
    def reference(self) -> str:
        """The path, with the version if there is one."""
        return f"{self.path}@{self.version}" if self.version else self.path

    @property
    def ending(self) -> str:
        """Says in a sentence how it ended."""
        return _ENDINGS[ExecutionStatus(self.status)]

    @property
    def without(self) -> str:
        """Says in a sentence that it did not enter a step."""
        is_running = self.status == ExecutionStatus.RUNNING
        return "still runs and has not yet" if is_running else f"{self.ending} without it"


class ChangedValue(NamedTuple):
    """A value of the workload that differs, as JSON; None where one side does not have it."""

    path: str
    left: str | None
    right: str | None


class ComparedStep(NamedTuple):
    """A step in both executions; a side is None if it was not entered there."""

    step: str
    left: StepCourse | None
    right: StepCourse | None

    @property
    def is_alike(self) -> bool:
        """Reports whether both sides ended alike, after as many visits and iterations."""
        return self.left is not None and self.right is not None and self.left.outcome == self.right.outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two executions beside each other.

    Attributes:
        changed: values of the workloads that differ, at most :data:`MOST_VALUES`; ``more`` others are not listed.
        difference: where their courses part, in a sentence.
    """

    left: ComparedExecution
    right: ComparedExecution
    changed: tuple[ChangedValue, ...]
    more: int
    steps: tuple[ComparedStep, ...]
    difference: str


async def compare(pool: asyncpg.Pool, left: int, right: int) -> Comparison:
    """Reads and compares two executions.

    Raises:
        ExecutionNotFoundError: the log does not have one of them.
    """
    one, other = await asyncio.gather(read_compared(pool, left), read_compared(pool, right))
    inputs = (one.workload, other.workload)
    values = changed_values(*inputs) if None not in inputs else iter(())
    shown = tuple(islice(values, MOST_VALUES))
    names = dict.fromkeys((*one.steps, *other.steps))
    return Comparison(
        left=one,
        right=other,
        changed=shown,
        more=sum(1 for _ in values),
        steps=tuple(ComparedStep(step, one.steps.get(step), other.steps.get(step)) for step in names),
        difference=first_difference(one, other),
    )


async def read_compared(pool: asyncpg.Pool, execution_id: int) -> ComparedExecution:
    """Reads one execution.

    Raises:
        ExecutionNotFoundError: the log does not have it.
    """
    execution = await read_execution(pool, execution_id)
    started = await pool.fetchrow(STARTED, execution_id)
    if execution is None or started is None:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
    rows = await pool.fetch(COURSE, execution_id)
    course, end = course_of(rows), execution.end_time or datetime.now(UTC)
    return ComparedExecution(
        execution_id=execution_id,
        playbook=started["playbook"] or "",
        path=started["path"] or started["playbook"] or "",
        version=started["version"] or None,
        status=execution.status,
        started_at=execution.start_time,
        ended_at=execution.end_time,
        seconds=(end - execution.start_time).total_seconds() if execution.start_time else 0.0,
        error=execution.error,
        workload=started["workload"],
        steps=_steps(execution, course, end),
        course=course,
        is_whole=len(rows) < MOST_EVENTS,
    )


def _steps(execution: ProjectedExecution, course: Course, end: datetime) -> dict[str, StepCourse]:
    seconds: dict[str, float] = defaultdict(float)
    for visit in course.values():
        seconds[visit.step] += ((visit.ended or end) - visit.started).total_seconds()
    steps = {}
    for step in execution.state.get("steps", []):
        name, status = step["step"], step["status"]
        if execution.status == ExecutionStatus.FAILED and status == ExecutionStatus.RUNNING:
            status = OPEN
        loop = execution.state.get("fanout", {}).get(name) or execution.state.get("loop", {}).get(name)
        counts = {}
        if loop is not None:
            total = loop["total_shards"] if "total_shards" in loop else loop["total"]
            counts = {"total": total, "done": loop["done"], "failed": loop["failed"]}
        steps[name] = StepCourse(status, step["visits"], **counts, seconds=seconds[name], error=step.get("error"))
    return steps


def course_of(rows: Sequence[Mapping[str, Any]]) -> Course:
    """Returns the visits from rows of :data:`COURSE`. A visit that began again counts from its first beginning."""
    course: Course = {}
    for row in rows:
        key = (row["step"] or "", row["visit"])
        visit = course.setdefault(key, VisitCourse(*key, row["created_at"]))
        if row["event_type"] == EventType.STEP_ENTER:
            visit.ended, visit.status, visit.fired, visit.error = None, "", (), None
        else:
            visit.ended, visit.status = row["created_at"], row["status"] or "COMPLETED"
            visit.fired, visit.error = tuple(row["fired"] or ()), row["error"]
    return course


def changed_values(left: Any, right: Any, path: str = "") -> Iterator[ChangedValue]:
    """Yields the values that differ, by their dotted paths; lists are compared whole."""
    waiting = [(path, left, right)]
    while waiting:
        path, left, right = waiting.pop()
        if isinstance(left, Mapping) and isinstance(right, Mapping) and (left or right):
            keys = [*dict.fromkeys((*left, *right))]
            waiting += [
                (f"{path}.{key}" if path else str(key), left.get(key, _MISSING), right.get(key, _MISSING))
                for key in reversed(keys)
            ]
        elif left is _MISSING or right is _MISSING or _json(left) != _json(right):
            yield ChangedValue(path, _shown(left), _shown(right))


_MISSING = object()


def _shown(value: Any) -> str | None:
    if value is _MISSING:
        return None
    text = _json(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()


def first_difference(left: ComparedExecution, right: ComparedExecution) -> str:
    """Returns where the courses part, in a sentence.

    Branches run side by side in any order, so visits are compared by step and number, in the order of the left
    execution; what only the right one has comes last, since an end that differs led there.
    """
    for key, visit in left.course.items():
        other = right.course.get(key)
        if other is None:
            if right.is_whole:
                return f"Only the left execution entered {visit.name}; the right one {right.without}."
        elif (sentence := _differing_end(visit, other)) is not None:
            return sentence
    for key, visit in right.course.items():
        if key not in left.course and left.is_whole:
            return f"Only the right execution entered {visit.name}; the left one {left.without}."
    if not (left.is_whole and right.is_whole):
        return f"The first {MOST_EVENTS:,} beginnings and ends of visits do not differ; later ones are not compared."
    if left.status != right.status:
        return f"Both took the same course, but the left execution {left.ending}, and the right one {right.ending}."
    if not left.course:
        return "Neither execution has entered a step."
    visits, steps = _counted(len(left.course), "visit"), _counted(len(left.steps), "step")
    return f"Both took the same course: {visits} of {steps}, which ended alike."


def _differing_end(left: VisitCourse, right: VisitCourse) -> str | None:
    """Returns a sentence about a visit that ended in different ways; None if it ended alike."""
    name = left.name[0].upper() + left.name[1:]
    if left.status != right.status:
        return f"{name} {_ended(left)} in the left execution, and {_ended(right)} in the right one."
    if left.fired != right.fired:
        after = f"After {left.name} {_ended(left, why=False)}"
        return f"{after}, the left execution went on to {_targets(left)}, and the right one to {_targets(right)}."
    return None


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _ended(visit: VisitCourse, *, why: bool = True) -> str:
    words = {"": "has not ended", "SKIPPED": "was skipped"}.get(visit.status, visit.status.lower())
    return f"{words} ({visit.error})" if why and visit.error and visit.status == "FAILED" else words


def _targets(visit: VisitCourse) -> str:
    return " and ".join(visit.fired) or "no further step"
