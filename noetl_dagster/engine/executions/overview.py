"""Overviews of executions for the command line and the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from noetl_dagster.engine.executions.progress import PoolView, duration, loop_rates, per_second, pool_views
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.envelopes import OK, Envelope, from_result
from noetl_dagster.events.projection import read_execution
from noetl_dagster.events.projection_row import ProjectedExecution
from noetl_dagster.events.queries import CHECKS, CHUNK_COUNTS, STEP_RESULTS, TAKERS, TEXT_OF_EXECUTION
from noetl_dagster.events.state import PASSED, ExecutionStatus
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.result_ref import ResultRef

OPEN = "OPEN"
"""Status of a step without an end in a failed execution."""

UNCLAIMED = """
SELECT loop_id FROM unnest($2::text[]) AS loop_id
WHERE NOT EXISTS (
    SELECT FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'loop_id' = loop_id AND event_type = 'command.claimed' AND meta ? 'loop_id')
"""


class LoopView(BaseModel, frozen=True):
    """Counts of a loop's iterations.

    Attributes:
        loop_id: identifies the loop of this visit.
        total: number of items; 0 while it is not known, as for a cursor or the chunks of another step.
        done: iterations that completed.
        failed: iterations that failed after their last attempt.
        fanout: the loop is a fan-out.
        rate: iterations that ended per second lately, while the loop runs.
        remaining_seconds: time for the remaining iterations at that rate; null if it is not known.
        waiting: no process has begun an iteration.
        so_far: chunks so far, if the loop takes the chunks of another step.
    """

    loop_id: str
    total: int
    done: int
    failed: int
    fanout: bool
    rate: float | None = None
    remaining_seconds: float | None = None
    waiting: bool = False
    so_far: int | None = None


class ChunksView(BaseModel, frozen=True):
    """The chunks that a step has made for others.

    Attributes:
        made: number of chunks.
        rows: rows in all of them; null if they were not counted.
    """

    made: int
    rows: int | None = None


class CheckView(BaseModel, frozen=True):
    """The latest outcome of a check.

    Attributes:
        name: name of the check.
        passed: the condition was true.
        severity: ``WARN`` or ``ERROR``.
        blocking: the step fails if the check does not pass.
        why: the reason, if the check did not pass.
        facts: values that explain the reason.
    """

    name: str
    passed: bool
    severity: str
    blocking: bool
    why: str | None = None
    facts: dict[str, Any] = {}


class StoredView(BaseModel, frozen=True):
    """A result that is too large for the log.

    Attributes:
        ref: its name, ``noetl://execution/...``.
        store_tier: the tier that stores it.
        physical_uri: location of its bytes.
        content_type: media type of the bytes.
        bytes_size: size in bytes, as stored.
        rows: number of rows, if it has rows.
        preview: its beginning, as text.
        extracted: the fields that ``output_select`` copied out.
    """

    ref: str
    store_tier: str
    physical_uri: str
    content_type: str
    bytes_size: int
    rows: int | None = None
    preview: str | None = None
    extracted: dict[str, Any] = {}


class WatermarkView(BaseModel, frozen=True):
    """The watermark of a step (``state``).

    Attributes:
        value: the watermark now.
        previous: its value before this execution; null for a first load.
    """

    value: int | float | str
    previous: int | float | str | None = None


class StepView(BaseModel, frozen=True):
    """The latest visit of a step.

    The answer about one execution also has results, ``checks``, ``watermark`` and ``pool``.

    Attributes:
        step: name of the step.
        status: ``RUNNING``, ``COMPLETED``, ``FAILED``, or ``OPEN``: the execution failed before a step that takes
            chunks had ended, and a resumption continues the step.
        visits: how often the execution entered the step.
        loop: counts, if the step is a loop.
        result: name of the stored result; null for a small one.
        data: the result, if the log has it. The result of a loop is the list in item order, with ``{"ref": ...}`` for a
            stored item and ``{"status": "error", "error": ...}`` for a failed one.
        ref: the stored result.
        error: the error, if the step failed.
        pool: its commands in the pool of workers.
        checks: the latest outcome of each check.
        watermark: the watermark, if it moved.
        chunks: the chunks that it has made, if other steps take them.
    """

    step: str
    status: str
    visits: int
    loop: LoopView | None = None
    result: str | None = None
    data: Any = None
    ref: StoredView | None = None
    error: str | None = None
    pool: PoolView | None = None
    checks: tuple[CheckView, ...] = ()
    watermark: WatermarkView | None = None
    chunks: ChunksView | None = None


class Overview(BaseModel, frozen=True):
    """Status of an execution. Times are UTC.

    Attributes:
        execution_id: id of the execution.
        playbook: name of the playbook.
        path: catalog path of the playbook.
        version: its version, if it is registered.
        sha256: of the text that the execution runs.
        status: ``RUNNING``, ``COMPLETED``, ``FAILED`` or ``CANCELLED``.
        epoch: number of starts and resumptions.
        run_id: the latest Dagster run.
        parent_execution_id: the execution that started this one.
        started_at: time of the start.
        ended_at: time of the end; null while it runs.
        seconds: from the start to the end, or to now.
        error: the error, if it failed.
        steps: the steps in the order of their first visits.
        warnings: warnings about the playbook, such as unknown keys of a lenient one.
        workload: the input values.
    """

    execution_id: str
    playbook: str
    path: str | None = None
    version: int | None = None
    sha256: str | None = None
    status: str
    epoch: int
    run_id: str | None = None
    parent_execution_id: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    seconds: float = 0.0
    error: str | None = None
    steps: tuple[StepView, ...] = ()
    warnings: tuple[str, ...] = ()
    workload: dict[str, Any] = {}


async def overview(runtime: Runtime, execution_id: int) -> Overview:
    """Reads one row of the projection, and the events committed since it was updated.

    Raises:
        ExecutionNotFoundError: the log has no such execution.
    """
    execution = await read_execution(runtime.pool, execution_id)
    if execution is None:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
    rates: dict[str, float] = {}
    waiting: set[str] = set()
    if execution.status == ExecutionStatus.RUNNING and execution.has_open_loop:
        rates, waiting = await loop_rates(runtime.pool, execution_id), await _waiting_loops(runtime, execution)
    sources, chunks = await _chunks(runtime, execution)
    state, start, end = execution.state, execution.start_time, execution.end_time or datetime.now(UTC)

    def with_chunks(step: StepView) -> StepView:
        loop = step.loop
        if loop is not None and step.status == ExecutionStatus.RUNNING and loop.loop_id in waiting:
            loop = loop.model_copy(update={"waiting": True})
        if loop is not None and step.step in sources and not loop.total:
            loop = loop.model_copy(update={"so_far": chunks[sources[step.step]].made})
        return step.model_copy(update={"loop": loop, "chunks": chunks.get(step.step)})

    return Overview(
        execution_id=str(execution_id),
        playbook=execution.playbook or "",
        status=execution.status,
        epoch=state.get("epoch", 1),
        run_id=state.get("run_id"),
        parent_execution_id=str(execution.parent_execution_id) if execution.parent_execution_id else None,
        started_at=start,
        ended_at=execution.end_time,
        seconds=round((end - start).total_seconds(), 3) if start else 0.0,
        error=execution.error,
        steps=tuple(map(with_chunks, step_views(execution, rates))),
        warnings=tuple(state.get("warnings", ())),
        workload=state.get("workload", {}),
    )


def step_views(execution: ProjectedExecution, rates: Mapping[str, float]) -> list[StepView]:
    """Returns the steps of an execution in the order of their first visits; ``rates`` as for :func:`loop_view`."""
    views = []
    for step in execution.state.get("steps", []):
        is_open = execution.status == ExecutionStatus.FAILED and step["status"] == ExecutionStatus.RUNNING
        fields = {name: step.get(name) for name in ("step", "status", "visits", "result", "error")}
        fields |= {"status": OPEN} if is_open else {}
        views.append(StepView(**fields, loop=loop_view(execution.state, step["step"], rates)))
    return views


def loop_view(state: dict[str, Any], step: str, rates: Mapping[str, float]) -> LoopView | None:
    """Returns the counts of the latest loop or fan-out of a step; ``rates`` are per second, by loop id."""
    fanout = state.get("fanout", {}).get(step)
    entry = fanout or state.get("loop", {}).get(step)
    if entry is None:
        return None
    total = entry["total_shards"] if fanout else entry["total"]
    left = total - entry["done"] - entry["failed"]
    rate = None if entry["completed"] else rates.get(entry["loop_id"])
    return LoopView(
        loop_id=entry["loop_id"],
        total=total,
        done=entry["done"],
        failed=entry["failed"],
        fanout=bool(fanout),
        rate=rate,
        remaining_seconds=round(left / rate, 1) if rate and left > 0 else None,
    )


async def _waiting_loops(runtime: Runtime, execution: ProjectedExecution) -> set[str]:
    """Returns the loops of which no iteration has begun."""
    views = (loop_view(execution.state, step["step"], {}) for step in execution.state.get("steps", []))
    idle = [view.loop_id for view in views if view is not None and view.total and not view.done + view.failed]
    rows = await runtime.pool.fetch(UNCLAIMED, execution.execution_id, idle) if idle else ()
    return {row["loop_id"] for row in rows}


async def _chunks(runtime: Runtime, execution: ProjectedExecution) -> tuple[dict[str, str], dict[str, ChunksView]]:
    """Returns the source of each step that takes chunks, and the counts of each source."""
    loops = execution.state.get("loop", {})
    if not any(entry.get("mode") == LoopMode.STREAM for entry in loops.values()):
        return {}, {}
    takers = await runtime.pool.fetch(TAKERS, execution.execution_id)
    rows = await runtime.pool.fetch(CHUNK_COUNTS, execution.execution_id)
    made = {row["node_name"]: ChunksView(made=row["chunks"], rows=row["rows"]) for row in rows}
    sources = {row["taker"]: row["source"] for row in takers}
    return sources, {source: made.get(source, ChunksView(made=0)) for source in sources.values()}


async def full_overview(runtime: Runtime, execution_id: int) -> Overview:
    """Adds results, checks and the figures of the pool of workers to :func:`overview`."""
    execution = await overview(runtime, execution_id)
    pooled = await pool_views(runtime.pool, execution_id, [step.step for step in execution.steps])
    checks = await _checks(runtime, execution_id)
    results = {}
    for row in await runtime.pool.fetch(STEP_RESULTS, execution_id):
        results[row["node_name"]], moved = _result(from_result(row["result"])), row["watermark"]
        # rows of a pending watermark still have to be loaded by later steps
        if moved is not None and ("pending" not in moved or execution.status == ExecutionStatus.COMPLETED):
            watermark = WatermarkView(value=moved["value"], previous=moved["previous"])
            results[row["node_name"]]["watermark"] = watermark

    def extended(step: StepView) -> StepView:
        view, ended = pooled.get(step.step), step.status != ExecutionStatus.RUNNING
        if view is not None and ended:
            view = view.model_copy(update={"rate": None})
        result = results.get(step.step, {}) if ended else {}
        return step.model_copy(update={"pool": view, "checks": tuple(checks.get(step.step, ())), **result})

    row = await runtime.pool.fetchrow(TEXT_OF_EXECUTION, execution_id)
    text = {} if row is None else {**row, "version": row["version"] or None}
    return execution.model_copy(update={"steps": tuple(map(extended, execution.steps)), **text})


def _result(envelope: Envelope) -> dict[str, Any]:
    """Returns the ``data`` or ``ref`` of a step's result."""
    if (reference := envelope.get("ref")) is not None:
        return {"ref": _stored(reference)}
    if "data" not in envelope and "results" in envelope:
        return {"data": [_item(item) for item in envelope["results"]]}
    return {"data": envelope.get("data")}


def _item(envelope: Envelope) -> Any:
    """Returns the entry of one item in the list of a loop's results."""
    if envelope.get("status") != OK:
        return {"status": envelope.get("status"), "error": envelope.get("error")}
    if (reference := envelope.get("ref")) is not None:
        return {"ref": _stored(reference).model_dump(mode="json")}
    return envelope.get("data")


def _stored(reference: Any) -> StoredView:
    result = ResultRef.model_validate(reference)
    return StoredView(**{name: getattr(result, name) for name in StoredView.model_fields})


async def _checks(runtime: Runtime, execution_id: int) -> dict[str, list[CheckView]]:
    """Returns by step the latest outcome of each check."""
    views: dict[str, list[CheckView]] = {}
    for row in await runtime.pool.fetch(CHECKS, execution_id):
        view = CheckView(
            name=row["name"],
            passed=row["status"] == PASSED,
            severity=row["severity"],
            blocking=row["blocking"],
            why=row["error"],
            facts=row["facts"] or {},
        )
        views.setdefault(row["node_name"], []).append(view)
    return views


def loop_progress(loop: LoopView) -> str:
    """Formats counts and pace: ``8 of 20 (40 %) done, 1 failed, 2300/s, 40 s left``."""
    ended = loop.done + loop.failed
    share = f" of {loop.total} ({100 * ended // loop.total} %)" if loop.total else ""
    return ", ".join([f"{ended}{share} done", *loop_notes(loop)])


def loop_notes(loop: LoopView) -> list[str]:
    """Formats what is known of a loop beyond its counts: failures, its pace, and what it waits for."""
    parts = []
    if loop.failed:
        parts.append(f"{loop.failed} failed")
    if loop.waiting:
        parts.append("waiting")
    if loop.rate and loop.done + loop.failed != loop.total:
        parts.append(per_second(loop.rate))
    if loop.remaining_seconds is not None:
        parts.append(f"{duration(loop.remaining_seconds)} left")
    return parts


def chunks_made(chunks: ChunksView) -> str:
    """Formats counts: ``60 chunks, 300000 rows``."""
    return f"{chunks.made} chunks" + ("" if chunks.rows is None else f", {chunks.rows} rows")
