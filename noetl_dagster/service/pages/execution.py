"""``/executions/<id>``: one execution, live; cancel and resume."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from noetl_dagster.engine.executions.addresses import asset_url, in_path, run_url
from noetl_dagster.engine.executions.overview import StepView
from noetl_dagster.engine.executions.watching import ShownEvent, SlowIteration, StepVisit, WatchedExecution
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.queries import CHECKS, TEXT_OF_EXECUTION
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.transport.wire import Id
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.service.executions import cancel_execution, resume_execution
from noetl_dagster.service.pages.access import TheForm, TheViewer
from noetl_dagster.service.pages.charts import TimeBar, waterfall
from noetl_dagster.service.pages.graph import StepState, graph_svg
from noetl_dagster.service.pages.live import LiveExecution, LiveExecutions, Parts, response
from noetl_dagster.service.pages.rendering import fragment, page, page_router, shortened
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import ApiProblem
from noetl_dagster.settings import Settings

router: APIRouter = page_router()

ExecutionId = Annotated[Id, InPath()]

LINES_AROUND = 3
"""Lines of the playbook that an error shows before and after the line that it names."""

RESUME_SECONDS = 10.0
"""Time that a form waits for the run that it launched. A run may also wait in a queue."""

RESUMPTIONS = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'execution.resumed'"


class SourceLines(NamedTuple):
    """Some lines of a playbook: the number of the first, their text, and the number of the line in question."""

    first: int
    lines: list[str]
    marked: int


@router.get("/executions/{execution_id}")
async def execution(
    execution_id: ExecutionId,
    request: Request,
    plane: ThePlane,
    viewer: TheViewer,
    at: Annotated[Id | None, Query(description="an event id: the execution as it was then")] = None,
    resuming: Annotated[bool, Query(description="a run that resumes it was launched")] = False,
) -> Response:
    """Shows an execution, now or as it was at an event."""
    runtime = plane.engine.runtime
    watched = await WatchedExecution.read(runtime.pool, execution_id, until=at)
    playbook = await playbook_of(runtime, execution_id)
    facts = await _facts(plane, watched)
    return page(
        request,
        "execution.html",
        viewer,
        id=execution_id,
        row=watched.row,
        at=at,
        resuming=resuming and not watched.is_running,
        parts=_parts(watched, playbook, runtime.settings, at),
        rows=_rows(execution_id, list(reversed(watched.events))),
        position=watched.position,
        is_live=at is None and watched.is_running,
        lines=None if playbook is None else _lines_of_error(watched, playbook),
        facts=facts,
        workload=watched.row.state.get("workload", {}),
        checks=await runtime.pool.fetch(CHECKS, execution_id),
        can_resume=watched.row.status == ExecutionStatus.FAILED or not facts["driven"],
    )


@router.get("/executions/{execution_id}/live")
async def live(
    execution_id: ExecutionId,
    request: Request,
    plane: ThePlane,
    viewer: TheViewer,
    position: Annotated[int, Query(ge=0, lt=2**64)] = 0,
) -> Response:
    """Returns what has changed after a position, in the order of commits."""
    runtime = plane.engine.runtime

    async def read() -> LiveExecution:
        playbook = await playbook_of(runtime, execution_id)
        return LiveExecution(
            execution_id,
            lambda now: _parts(now, playbook, runtime.settings),
            lambda events: _rows(execution_id, events),
        )

    executions: LiveExecutions = request.app.state.live
    shared = await executions.open(execution_id, read)
    return response(await shared.since(runtime.pool, position))


@router.post("/executions/{execution_id}/cancel")
async def cancel(execution_id: ExecutionId, plane: ThePlane, form: TheForm) -> Response:
    """Cancels an execution."""
    reason = form.fields.get("reason", "").strip()[:500] or "cancelled on request"
    await cancel_execution(plane, execution_id, reason)
    return RedirectResponse(f"/executions/{execution_id}", 303)


@router.post("/executions/{execution_id}/resume")
async def resume(execution_id: ExecutionId, plane: ThePlane, form: TheForm) -> Response:
    """Resumes an execution that failed or lost its process, and waits a little until the run has begun.

    Raises:
        ApiProblem: 409, it has ended for good or runs; 503, the run did not start, or ended before it resumed anything.
    """
    pool = plane.engine.runtime.pool
    before = await pool.fetchval(RESUMPTIONS, execution_id)
    await resume_execution(plane, execution_id)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RESUME_SECONDS):
            while True:
                failure = plane.launcher.failure(execution_id)
                if await pool.fetchval(RESUMPTIONS, execution_id) != before:
                    return RedirectResponse(f"/executions/{execution_id}", 303)  # the page is live from there
                if failure:
                    raise ApiProblem(503, f"the run that was to resume execution {execution_id} ended early: {failure}")
                await asyncio.sleep(0.2)
    return RedirectResponse(f"/executions/{execution_id}?resuming=true", 303)


async def playbook_of(runtime: Runtime, execution_id: int) -> Playbook | None:
    """Returns the playbook that an execution runs; None if this version cannot load its text."""
    async for first in runtime.log.events(execution_id, page=1):
        try:
            return (await runtime.program(ExecutionState.fold(execution_id, [first]))).playbook
        except NoetlError:
            return None
    return None


async def _facts(plane: Plane, watched: WatchedExecution) -> dict[str, Any]:
    """Returns what does not change while an execution runs."""
    settings = plane.engine.runtime.settings
    text = await plane.engine.runtime.pool.fetchrow(TEXT_OF_EXECUTION, watched.id)
    return {
        "path": None if text is None else text["path"],
        "version": None if text is None else text["version"] or None,
        "run": run_url(settings, run) if (run := watched.row.state.get("run_id")) else None,
        "driven": not watched.is_running or await plane.engine.liveness.is_driven(watched.id),
    }


def _parts(watched: WatchedExecution, playbook: Playbook | None, settings: Settings, at: int | None = None) -> Parts:
    """Renders the parts of the page that change."""
    id_ = watched.id
    assets = {one.step: asset_url(settings, one.asset) for one in watched.visits.values() if one.asset}
    steps = watched.steps()
    start, end = watched.row.start_time, watched.row.end_time or datetime.now(UTC)
    if at is not None and watched.row.end_time is None:
        end = watched.row.updated_at or end
    chart = Markup("")
    if start is not None and watched.visits:
        visits = [_bar_of_visit(id_, one, start) for one in watched.visits.values()]
        chart = waterfall(visits, [_bar_of_iteration(id_, one) for one in watched.slowest], start, end)
    seconds = (end - start).total_seconds() if start is not None else 0.0
    return {
        "summary": fragment("parts/summary.html", id=id_, row=watched.row, seconds=seconds),
        "graph": "" if playbook is None else _graph(watched, playbook, steps),
        "steps": fragment("parts/steps.html", id=id_, steps=steps, assets=assets),
        "waterfall": chart,
    }


def _graph(watched: WatchedExecution, playbook: Playbook, steps: Sequence[StepView]) -> Markup:
    states = {}
    for step in steps:
        loop = step.loop
        counts = {} if loop is None else {"done": loop.done, "total": loop.total, "failed": loop.failed}
        states[step.step] = StepState(status=step.status, visits=step.visits, **counts)
    return graph_svg(playbook, states=states, link=lambda step: f"/executions/{watched.id}/steps/{in_path(step)}")


def _bar_of_visit(execution_id: int, one: StepVisit, start: datetime) -> TimeBar:
    name = shortened(one.step, 22) + (f" ×{one.visit}" if one.visit > 1 else "")
    link = f"/executions/{execution_id}/steps/{in_path(one.step)}?visit={one.visit}"
    return TimeBar(name, link, one.started or start, one.ended, one.status)


def _bar_of_iteration(execution_id: int, one: SlowIteration) -> TimeBar:
    name = f"{shortened(one.step, 18)}[{one.iteration}]"
    link = f"/executions/{execution_id}/steps/{in_path(one.step)}/{one.iteration}?visit={one.visit}"
    return TimeBar(name, link, one.ended - timedelta(seconds=one.seconds), one.ended, "plain")


def _rows(execution_id: int, events: Sequence[ShownEvent]) -> Markup:
    return fragment("parts/event_rows.html", id=execution_id, events=events)


def _lines_of_error(watched: WatchedExecution, playbook: Playbook) -> SourceLines | None:
    """Returns the lines of the playbook around the step whose failure ended the execution."""
    failed = [step.step for step in watched.steps() if step.status == "FAILED"]
    step = next((one for one in playbook.steps if one.name in failed), None)
    if not watched.row.error or step is None or step.place is None:
        return None
    named = re.search(rf"{re.escape(Path(playbook.file).name)}:(\d+)\b", watched.row.error)
    line = int(named[1]) if named else step.place.line
    return lines_around(playbook.source, line)


def lines_around(source: str, line: int, before: int = LINES_AROUND, after: int = LINES_AROUND) -> SourceLines:
    """Returns some lines of a text before and after one, which counts from 1."""
    lines = source.splitlines()
    first = max(line - before, 1)
    return SourceLines(first, lines[first - 1 : line + after], line)
