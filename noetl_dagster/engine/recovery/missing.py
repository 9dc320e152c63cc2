"""Forgets results whose bytes are missing, so that a resumption makes them again.

The rows of the references are deleted, and an event names the visits of steps that they belong to. From the next epoch
on, these visits have not ended, and commands whose reference is gone run again as new attempts; see
:meth:`~noetl_dagster.events.state.ExecutionState.end_of`. The others keep their results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.state import ExecutionStatus, StepStatus
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.worker.execution import Execution

# The visits whose results consist of missing ones: themselves, or as parts; and the events that refer to them.
_VISITS = """
WITH RECURSIVE affected AS (
    SELECT unnest($2::bigint[]) AS ref_id, unnest($2::bigint[]) AS missing
    UNION
    SELECT manifest_id, missing FROM affected
    JOIN noetl.manifest_part ON part_ref_id = affected.ref_id
    JOIN noetl.result_ref whole ON whole.ref_id = manifest_id AND whole.execution_id = $1
)
SELECT node_name AS step, (meta ->> 'visit')::int AS visit, bool_or(event_type = 'call.partial') AS chunks,
       array_agg(DISTINCT ref_id) || array_agg(DISTINCT missing) AS refs
FROM noetl.event JOIN affected ON ref_id = (result #>> '{reference,ref_id}')::bigint
WHERE execution_id = $1 AND event_type IN (
    'command.completed', 'loop.shard.done', 'retry_sequence_completed', 'call.partial', 'step.exit') AND meta ? 'visit'
GROUP BY 1, 2 ORDER BY 1, 2
"""
_FORGET = "DELETE FROM noetl.result_ref WHERE execution_id = $1 AND ref_id = ANY($2::bigint[])"

_TARGETS: Any = {"routing": {"arcs": {"__all__": {"step"}}}}
"""An arc names a step, and does not need its result."""


@dataclass(slots=True)
class Forgotten:
    """The outcome of forgetting.

    Attributes:
        executions: those to resume.
        results: references that were deleted.
        kept: why other missing results are not made again, a line for each step.
    """

    executions: list[int] = field(default_factory=list)
    results: int = 0
    kept: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.executions)) or "none"
        return "; ".join([f"{self.results} missing results forgotten; executions to resume: {shown}", *self.kept])


async def forget_missing(runtime: Runtime, missing: Mapping[int, Sequence[int]]) -> Forgotten:
    """Forgets missing results that can be made again and that their executions still need.

    Args:
        missing: ids of the references, by execution.
    """
    forgotten = Forgotten()
    for execution_id, ref_ids in missing.items():
        try:
            execution = await runtime.load(execution_id)
        except NoetlError as error:
            forgotten.kept.append(str(error))
            continue
        await _forget(runtime, execution, ref_ids, forgotten)
    return forgotten


async def _forget(runtime: Runtime, execution: Execution, ref_ids: Sequence[int], forgotten: Forgotten) -> None:
    state, lost, refs = execution.state, [], set[int]()
    if not state.is_running and state.status is not ExecutionStatus.FAILED:
        forgotten.kept.append(f"execution {execution.id} is {state.status} and cannot be resumed")
        return
    visits = await runtime.pool.fetch(_VISITS, execution.id, ref_ids)
    needed = _needed(execution, {row["step"] for row in visits})
    for row in visits:
        step, visit = row["step"], row["visit"]
        why = _obstacle(execution, step, visit, chunks=row["chunks"])
        if why is None and step not in needed:
            why = "no step that is still to run names its result"
        if why is not None:
            forgotten.kept.append(f"execution {execution.id}: the missing results of {step} are not made again: {why}")
            continue
        lost.append([step, visit])
        refs.update(row["refs"])
    if not lost:
        return
    names = ", ".join(sorted({step for step, _ in lost}))
    meta = {"epoch": state.epoch, "lost": lost}
    event = runtime.event(state, EventType.WARNING, state.playbook, "playbook", "WARNING", meta)
    event.error = f"results of {names} are missing in the stores; when the execution is resumed, they are made again"
    async with runtime.pool.acquire() as connection, connection.transaction():
        await runtime.log.append([event], connection=connection)
        await connection.execute(_FORGET, execution.id, sorted(refs))
    forgotten.executions.append(execution.id)
    forgotten.results += len(refs & {*ref_ids})


def _obstacle(execution: Execution, step: str, visit: int, *, chunks: bool) -> str | None:
    """Returns why the commands of a visit cannot run again, or None."""
    program = execution.program.step(step)
    loop = program.step.loop
    if program.sink is not None:
        return "its sink has written them"
    if program.step.state is not None:
        return "its watermark has moved past them"
    if chunks:
        return "they are chunks of a stream"
    if loop is not None and (loop.mode is LoopMode.STREAM or loop.cursor is not None):
        return "its loop takes each item once"
    if any(entry.rule.continues_success for task in program.tasks for entry in task.continuations):
        return "they are pages that follow each other"
    if visit < execution.state.visits.get(step, visit):
        return "a later visit has replaced them"
    return None


def _needed(execution: Execution, lost: Iterable[str]) -> set[str]:
    """Returns which of the steps with lost results are named by steps that have not ended, or that run again."""
    playbook, state = execution.playbook, execution.state
    texts = {step.name: step.model_dump_json(exclude=_TARGETS) for step in playbook.steps}
    completed = (end for end in state.latest.values() if end.status is StepStatus.COMPLETED)
    ended = {end.step for end in completed if (end.step, state.visits.get(end.step)) not in state.entered}
    cyclic = {name for region in execution.program.graph.regions if region.is_cycle for name in region.steps}
    open_steps = texts.keys() - (ended - cyclic)
    needed: set[str] = set()
    while more := {
        step
        for step in {*lost} - needed
        if step in open_steps
        or any(re.search(rf"\b{re.escape(step)}\b", texts[name]) for name in open_steps | needed if name != step)
    }:
        needed |= more
    return needed
