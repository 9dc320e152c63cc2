"""``/executions/<id>/steps/<step>``: the visits of a step, its iterations, and each attempt of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import asyncpg
from fastapi import Path, Query, Request
from pydantic import AfterValidator
from starlette.responses import Response

from noetl_dagster.engine.executions.addresses import from_path
from noetl_dagster.engine.executions.iterations import (
    IterationFilter,
    IterationPage,
    durations,
    events_of_command,
    events_of_iteration,
    failure_groups,
    list_iterations,
)
from noetl_dagster.engine.executions.overview import LoopView
from noetl_dagster.engine.executions.progress import brief
from noetl_dagster.engine.executions.watching import SLOW_SECONDS, StepVisit, WatchedExecution, visits_of_step
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.envelopes import Envelope, from_result
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.rules import RulePlace, rule_places
from noetl_dagster.service.pages.access import TheViewer
from noetl_dagster.service.pages.charts import histogram
from noetl_dagster.service.pages.execution import ExecutionId, SourceLines, playbook_of
from noetl_dagster.service.pages.rendering import page, page_router
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import ApiProblem

router = page_router()

SHOWN = 100
"""Iterations of one page."""

MOST_VISITS = 50
"""Visits to which a page links, the latest ones."""

STATES = {"": "any", "failed": "failed", "open": "not ended", "completed": "completed"}

StepName = Annotated[str, Path(max_length=2048), AfterValidator(from_path)]
Visit = Annotated[int | None, Query(ge=1, lt=2**31)]


@dataclass(slots=True)
class Attempt:
    """A command of an iteration: one attempt of it.

    Attributes:
        waited: seconds in the queue, of the pool.
        reason: why it follows another attempt, as ``meta.retry`` says.
        claims: processes that had it; more than one if a worker was lost.
    """

    number: int
    issued: datetime | None = None
    claims: list[Event] = field(default_factory=list)
    notes: list[Event] = field(default_factory=list)
    end: Event | None = None
    reason: Mapping[str, Any] | None = None

    @property
    def status(self) -> str:
        """The state of the attempt."""
        if self.end is not None:
            return str(self.end.status)
        return "RUNNING" if self.claims else "WAITING"

    @property
    def waited(self) -> float | None:
        """Seconds in the queue, if it was in the pool."""
        return self.claims[-1].meta.get("waited") if self.claims else None

    @property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """The tasks that ran, with the decisions of their policies."""
        return self.end.meta.get("tasks", ()) if self.end is not None else ()

    @property
    def result(self) -> Envelope | None:
        """The result, if it has one."""
        return from_result(self.end.result) if self.end is not None and self.end.result is not None else None


@router.get("/executions/{execution_id}/steps/{step}")
async def step_page(
    execution_id: ExecutionId,
    step: StepName,
    request: Request,
    plane: ThePlane,
    viewer: TheViewer,
    visit: Visit = None,
) -> Response:
    """Shows a visit of a step: its iterations, chosen by filters, or the attempts of its command."""
    pool = plane.engine.runtime.pool
    course, chosen, playbook = await _found(plane, execution_id, step, visit)
    fields = {name: request.query_params.get(name, "").strip()[:500] for name in _FIELDS}
    wanted, problem = _filter(fields)
    watched = await WatchedExecution.read(pool, execution_id)
    names: dict[str, Any] = {
        "id": execution_id,
        "step": step,
        "row": watched.row,
        "course": course[-MOST_VISITS:],
        "more_visits": max(len(course) - MOST_VISITS, 0),
        "visit": chosen,
        "lines": _definition(playbook, step),
        "can_resume": watched.row.status == ExecutionStatus.FAILED,
        "fields": fields,
        "states": STATES,
        "problem": problem,
        "groups": (),
        "histogram": "",
        "sampled": False,
    }
    if not chosen.loop_ids:
        events = await events_of_command(pool, execution_id, step, chosen.visit)
        rules = _Rules(playbook, step)
        return page(request, "step.html", viewer, **names, loop=None, attempts=attempts_of(events), rules=rules)
    loop = watched.loop_of(step)
    counts = loop if loop is not None and loop.loop_id in chosen.loop_ids else None
    names |= {"loop": counts, "slow": brief(SLOW_SECONDS)}
    if not fields["first"] and not fields["after"]:
        names |= await _summary(pool, execution_id, step, chosen, counts)
    is_over = counts is not None and 0 < counts.total <= counts.done + counts.failed
    iterations = IterationPage([])
    if not problem and not (is_over and wanted.state == "open"):
        iterations = await list_iterations(pool, execution_id, step, chosen, wanted, SHOWN)
    following = "" if iterations.next is None else _query(fields, chosen, iterations.next)
    return page(request, "step.html", viewer, **names, iterations=iterations.rows, following=following)


async def _summary(
    pool: asyncpg.Pool, execution_id: int, step: str, visit: StepVisit, counts: LoopView | None
) -> dict[str, Any]:
    """Returns what the first page of a loop's iterations shows above them."""
    size = visit.total or (counts.done + counts.failed if counts is not None else 0)
    groups, took = await asyncio.gather(
        failure_groups(pool, execution_id, visit), durations(pool, execution_id, visit, size)
    )
    chart = histogram(took.bins, f"Durations of the iterations of {step}")
    return {"groups": groups, "histogram": chart, "sampled": took.sampled}


@router.get("/executions/{execution_id}/steps/{step}/{index}")
async def iteration_page(
    execution_id: ExecutionId,
    step: StepName,
    index: Annotated[int, Path(ge=0, lt=2**31 - 1)],
    request: Request,
    plane: ThePlane,
    viewer: TheViewer,
    visit: Visit = None,
) -> Response:
    """Shows one iteration: its item, and for each attempt its tasks, decisions, result and events."""
    _, chosen, playbook = await _found(plane, execution_id, step, visit)
    pool = plane.engine.runtime.pool
    events = await events_of_iteration(pool, execution_id, chosen, index)
    if not events:
        raise ApiProblem(
            404, f"step {step} of execution {execution_id} has no iteration {index} in visit {chosen.visit}"
        )
    return page(
        request,
        "iteration.html",
        viewer,
        id=execution_id,
        step=step,
        visit=chosen,
        index=index,
        has_next=bool(await events_of_iteration(pool, execution_id, chosen, index + 1, most=1)),
        attempts=attempts_of(events),
        item=next((one.current_item for one in events if one.current_item is not None), None),
        events=events,
        rules=_Rules(playbook, step),
    )


def attempts_of(events: Sequence[Event]) -> list[Attempt]:
    """Groups the events of one iteration, or of a visit without a loop, by command."""
    attempts: dict[str, Attempt] = {}
    for event in events:
        name = str(event.meta.get("command_id", "")).removesuffix("/shard")
        if not name:
            continue
        one = attempts.setdefault(name, Attempt(int(event.meta.get("attempt", 1))))
        if event.event_type == EventType.COMMAND_ISSUED:
            one.issued, one.reason = event.created_at, event.meta.get("retry")
        elif event.event_type == EventType.COMMAND_CLAIMED:
            one.claims.append(event)
        elif event.event_type == EventType.COMMAND_HEARTBEAT:
            one.notes.append(event)
        elif event.event_type in COMMAND_ENDS and (one.end is None or not one.tasks):
            one.end = event
    return list(attempts.values())


class _Rules:
    """The rules of a step's policies, as templates look them up."""

    def __init__(self, playbook: Playbook | None, step: str) -> None:
        self._places = rule_places(playbook) if playbook is not None else {}
        self._step = step

    def place(self, task: str, rule: int | str) -> RulePlace | None:
        """Returns the line and condition of a rule; None if the playbook does not have it."""
        return self._places.get((self._step, task, rule))


async def _found(
    plane: Plane, execution_id: int, step: str, visit: int | None
) -> tuple[list[StepVisit], StepVisit, Playbook | None]:
    """Returns the visits of a step, the chosen one or the latest, and the playbook.

    Raises:
        ApiProblem: 404, the playbook has no such step, or the step no such visit.
    """
    pool = plane.engine.runtime.pool
    course = await visits_of_step(pool, execution_id, step)
    playbook = await playbook_of(plane.engine.runtime, execution_id)
    if visit is not None:
        chosen = next((one for one in course if one.visit == visit), None)
    else:
        chosen = course[-1] if course else None
    if chosen is None:
        is_known = playbook is not None and any(one.name == step for one in playbook.steps)
        if playbook is None and not course:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        if not is_known and not course:
            raise ApiProblem(404, f"execution {execution_id} has no step {step!r:.200}")
        chosen = StepVisit(step, visit or 1, status="WAITING")
    return course, chosen, playbook


def _definition(playbook: Playbook | None, step: str) -> SourceLines | None:
    """Returns the lines of the playbook that define a step."""
    if playbook is None:
        return None
    shown = next((one for one in playbook.steps if one.name == step), None)
    if shown is None or shown.place is None:
        return None
    following = [
        one.place.line for one in playbook.steps if one.place is not None and one.place.line > shown.place.line
    ]
    lines = playbook.source.splitlines()
    return SourceLines(shown.place.line, lines[shown.place.line - 1 : min(following, default=len(lines) + 1) - 1], 0)


_FIELDS = ("state", "error", "slower", "first", "order", "after")


def _filter(fields: Mapping[str, str]) -> tuple[IterationFilter, str]:
    """Returns the filter of the fields of an address, and what is wrong with them."""
    wanted = IterationFilter(state=fields["state"], error=fields["error"] or None)
    if fields["state"] not in STATES:
        return wanted, f"state: {fields['state']!r} is none of {', '.join(one for one in STATES if one)}"
    try:
        if fields["slower"]:
            wanted = replace(wanted, slower=max(float(fields["slower"]), 0.0))
        if fields["first"]:
            wanted = replace(wanted, first=min(max(int(fields["first"]), 0), 2**31 - 1))
        is_slow = wanted.slower is not None and wanted.slower >= SLOW_SECONDS and not fields["first"]
        if fields["order"] == "slowest" or is_slow:
            wanted = replace(wanted, slowest_first=True)
        if fields["after"]:
            seconds, _, event_id = fields["after"].partition("-")
            wanted = replace(wanted, after=(float(seconds), int(event_id)))
    except ValueError as error:
        return wanted, f"{error}; write seconds as 1.5 and an index as 40000"
    return wanted, ""


def _query(names: Mapping[str, str], visit: StepVisit, following: IterationFilter) -> str:
    fields = {**names, "visit": str(visit.visit), "first": str(following.first) if following.first else ""}
    if following.after is not None:
        fields["after"] = f"{following.after[0]!r}-{following.after[1]}"
    return urlencode({name: text for name, text in fields.items() if text})
