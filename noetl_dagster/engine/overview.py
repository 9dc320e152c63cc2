"""An execution at a glance: what the command line and the HTTP API show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from noetl_dagster.engine.progress import loop_progress
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.state import ExecutionState, StepEnd
from noetl_dagster.storage.refs import ResultRef


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
    """Reads the state and the live counts of an execution.

    Raises:
        ExecutionNotFoundError: the log has no such execution.
    """
    events = await runtime.log.lifecycle(execution_id)
    if not events:
        raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
    state = ExecutionState.fold(execution_id, events)
    loops = {
        entry.step: LoopView(
            loop_id=entry.loop_id,
            total=entry.total,
            done=entry.done,
            failed=entry.failed,
            fanout=entry.fanout,
        )
        for entry in await loop_progress(runtime.pool, execution_id)
    }
    end = state.ended_at or datetime.now(UTC)
    return Overview(
        execution_id=str(execution_id),
        playbook=state.playbook,
        status=state.status,
        epoch=state.epoch,
        run_id=state.run_id,
        parent_execution_id=str(state.parent_execution_id) if state.parent_execution_id else None,
        started_at=state.started_at,
        ended_at=state.ended_at,
        seconds=round((end - state.started_at).total_seconds(), 3) if state.started_at else 0.0,
        error=state.error,
        steps=tuple(_step(state, name, loops.get(name)) for name in state.visits),
        warnings=tuple(state.warnings),
        workload=state.workload,
    )


def _step(state: ExecutionState, name: str, loop: LoopView | None) -> StepView:
    visits = state.visits[name]
    end = state.end_of(name, visits)
    return StepView(
        step=name,
        status=end.status.value if end is not None else "RUNNING",
        visits=visits,
        loop=loop,
        result=_address(end),
        error=end.error if end is not None else None,
    )


def _address(end: StepEnd | None) -> str | None:
    reference = end.envelope.get("ref") if end is not None else None
    if reference is None:
        return None
    known = reference if isinstance(reference, ResultRef) else ResultRef.model_validate(reference)
    return known.physical_uri
