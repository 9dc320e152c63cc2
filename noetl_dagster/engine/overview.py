"""An execution at a glance: what the command line and the HTTP API show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.projected import ProjectedExecution
from noetl_dagster.events.projection import read_execution
from noetl_dagster.events.queries import SMALL_RESULTS


class LoopView(BaseModel):
    model_config = ConfigDict(frozen=True)

    loop_id: str
    total: int
    done: int
    failed: int
    fanout: bool


class StepView(BaseModel):
    """The latest visit of a step. ``result`` is the address of a stored result, None for a small one."""

    model_config = ConfigDict(frozen=True)

    step: str
    status: str
    visits: int
    loop: LoopView | None = None
    result: str | None = None
    error: str | None = None


class Overview(BaseModel):
    """Status of an execution. Times are UTC, ``seconds`` counts from the start to the end or to now."""

    model_config = ConfigDict(frozen=True)

    execution_id: str
    playbook: str
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
    """Reads one row of the projection, and what was committed since the projection last looked.

    Raises:
        ExecutionNotFoundError: the log has no such execution.
    """
    found = await read_execution(runtime.pool, execution_id)
    if found is None:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
    return overview_of(found)


async def small_results(runtime: Runtime, execution_id: int, characters: int) -> dict[str, str]:
    """By step, the beginning of a result that is kept in the log itself, as JSON; none for larger ones."""
    rows = await runtime.pool.fetch(SMALL_RESULTS, execution_id, characters)
    return {row["node_name"]: row["data"] for row in rows if row["data"] not in (None, "null", "{}")}


def overview_of(execution: ProjectedExecution) -> Overview:
    """The view of a row of ``noetl.execution``."""
    state, start = execution.state, execution.start_time
    end = execution.end_time or datetime.now(UTC)
    return Overview(
        execution_id=str(execution.execution_id),
        playbook=execution.playbook or "",
        status=execution.status,
        epoch=state.get("epoch", 1),
        run_id=state.get("run_id"),
        parent_execution_id=str(execution.parent_execution_id) if execution.parent_execution_id else None,
        started_at=start,
        ended_at=execution.end_time,
        seconds=round((end - start).total_seconds(), 3) if start else 0.0,
        error=execution.error,
        steps=tuple(_step(state, step) for step in state.get("steps", [])),
        warnings=tuple(state.get("warnings", ())),
        workload=state.get("workload", {}),
    )


def _step(state: dict[str, Any], step: dict[str, Any]) -> StepView:
    return StepView(
        step=step["step"],
        status=step["status"],
        visits=step["visits"],
        loop=_loop(state, step["step"]),
        result=step.get("result"),
        error=step.get("error"),
    )


def _loop(state: dict[str, Any], step: str) -> LoopView | None:
    fanout = state.get("fanout", {}).get(step)
    entry = fanout or state.get("loop", {}).get(step)
    if entry is None:
        return None
    return LoopView(
        loop_id=entry["loop_id"],
        total=entry["total_shards"] if fanout else entry["total"],
        done=entry["done"],
        failed=entry["failed"],
        fanout=bool(fanout),
    )
