"""Compares two executions: their workloads, their steps, and the first step that differs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import orjson

from noetl_dagster.engine.executions.overview import Overview, StepView, full_overview
from noetl_dagster.engine.runtime import Runtime

MOST_VALUES = 200
"""Values of the workloads that are shown as different."""

MOST_BYTES = 1_000_000
"""Size of a workload that is compared; the overview has only smaller ones."""

LONGEST_VALUE = 500
LONGEST_ERROR = 300

WORKLOAD = f"""
SELECT context -> 'workload' FROM noetl.event
WHERE execution_id = $1 AND event_type = 'playbook.initialized' AND octet_length(context ->> 'workload') < {MOST_BYTES}
ORDER BY event_id LIMIT 1
"""

# Seconds from the first beginning of each step to its last end, or to now.
SECONDS = """
SELECT node_name, extract(epoch FROM CASE WHEN count(*) FILTER (WHERE event_type = 'step.exit') = 0 THEN now()
    ELSE max(created_at) END - min(created_at))::float8 AS seconds
FROM noetl.event WHERE execution_id = $1 AND event_type IN ('step.enter', 'step.exit')
GROUP BY node_name
"""


class ChangedValue(NamedTuple):
    """A value of the workload that differs, as JSON; None where one side does not have it."""

    path: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Side:
    """One of two executions: its overview, its workload, None if that is too large, and the seconds of its steps."""

    overview: Overview
    workload: Mapping[str, Any] | None
    seconds: Mapping[str, float]

    @property
    def reference(self) -> str:
        """The catalog path of the playbook, with the version if there is one."""
        path = self.overview.path or self.overview.playbook
        return f"{path}@{self.overview.version}" if self.overview.version else path


class ComparedStep(NamedTuple):
    """A step in both executions; a side is None if it was not entered there."""

    step: str
    left: StepView | None
    right: StepView | None

    @property
    def is_alike(self) -> bool:
        """Reports whether both sides ended alike, after as many visits and iterations."""
        return self.left is not None and self.right is not None and _outcome(self.left) == _outcome(self.right)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two executions beside each other.

    Attributes:
        changed: values of the workloads that differ, at most :data:`MOST_VALUES`; ``more`` others are not listed. None
            if a workload is too large to be compared.
        difference: the first step that differs, in a sentence.
    """

    left: Side
    right: Side
    changed: tuple[ChangedValue, ...] | None
    more: int
    steps: tuple[ComparedStep, ...]
    difference: str


async def compare(runtime: Runtime, left: int, right: int) -> Comparison:
    """Reads and compares two executions.

    Raises:
        ExecutionNotFoundError: the log does not have one of them.
    """
    one, other = await asyncio.gather(_side(runtime, left), _side(runtime, right))
    shown, more = None, 0
    if one.workload is not None and other.workload is not None:
        values = changed_values(one.workload, other.workload)
        shown, more = tuple(islice(values, MOST_VALUES)), sum(1 for _ in values)
    views = [{view.step: view for view in side.overview.steps} for side in (one, other)]
    names = dict.fromkeys((*views[0], *views[1]))
    steps = tuple(ComparedStep(step, views[0].get(step), views[1].get(step)) for step in names)
    return Comparison(one, other, shown, more, steps, _difference(one.overview, other.overview, steps))


async def _side(runtime: Runtime, execution_id: int) -> Side:
    execution = await full_overview(runtime, execution_id)
    workload = await runtime.pool.fetchval(WORKLOAD, execution_id)
    rows = await runtime.pool.fetch(SECONDS, execution_id)
    return Side(execution, workload, {row["node_name"]: row["seconds"] for row in rows})


def _outcome(view: StepView) -> tuple[Any, ...]:
    """Returns what is compared: everything but the time and the words of an error."""
    counts = None if view.loop is None else (view.loop.total, view.loop.done, view.loop.failed)
    return view.status, view.visits, counts


def changed_values(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[ChangedValue]:
    """Yields the values that differ, by their dotted paths; lists are compared as a whole."""
    waiting: list[tuple[str, Any, Any]] = [("", left, right)]
    while waiting:
        path, one, other = waiting.pop()
        if isinstance(one, Mapping) and isinstance(other, Mapping) and (one or other):
            keys = [*dict.fromkeys((*one, *other))]
            waiting += [
                (f"{path}.{key}" if path else str(key), one.get(key, _MISSING), other.get(key, _MISSING))
                for key in reversed(keys)
            ]
        elif one is _MISSING or other is _MISSING or _json(one) != _json(other):
            yield ChangedValue(path, _shown(one), _shown(other))


_MISSING = object()


def _shown(value: Any) -> str | None:
    if value is _MISSING:
        return None
    text = _json(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()


def _difference(left: Overview, right: Overview, steps: tuple[ComparedStep, ...]) -> str:
    """Returns the first step that differs, in the order of the left execution, in a sentence."""
    for name, one, other in (step for step in steps if not step.is_alike):
        if one is None or other is None:
            return f"Only the {'left' if other is None else 'right'} execution entered step {name}."
        if one.status != other.status:
            return f"Step {name} {_ended(one)} in the left execution, and {_ended(other)} in the right one."
        return f"Step {name} has other numbers of visits or iterations in the right execution."
    if left.status != right.status:
        return f"All steps ended alike, but the left execution is {left.status}, and the right one {right.status}."
    return "All steps ended alike." if steps else "Neither execution has entered a step."


def _ended(view: StepView) -> str:
    words = {"RUNNING": "has not ended", "OPEN": "has not ended", "SKIPPED": "was skipped"}
    words_of_end = words.get(view.status, view.status.lower())
    return f"{words_of_end} ({view.error[:LONGEST_ERROR]})" if view.error else words_of_end
