"""Steps joined by arcs ``on: call.partial``: one region of the graph, walked side by side in one op."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noetl_dagster.engine.loops.stream import StreamBrokenError
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.events.state import ExecutionState, StepEnd, StepStatus
from noetl_dagster.playbook.graph import Region
from noetl_dagster.worker.execution import Execution

VISIT = 1
"""A stream stands in no cycle: each of its steps is visited once."""


async def run_streams(steps: Steps, execution: Execution, region: Region) -> tuple[list[str], StepEnd | None]:
    """Runs the source of a stream, and while it runs the steps that take its chunks, and those that take theirs.

    Returns:
        The steps outside that its arcs fired into, and a failure that no arc took, if there is one.
    """
    walk = _Walk(steps, execution)
    try:
        await walk.step(region.order[0])
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    await walk.leave_out(region.order[1:])
    found = (execution.state.end_of(step, VISIT) for step in region.order)
    ends = [end for end in found if end is not None]
    fired = dict.fromkeys(target for end in ends for target in end.fired)
    return list(fired), next((end for end in ends if end.unhandled), None)


def streams_are_over(execution: Execution, region: Region) -> bool:
    """Whether nothing in a stream is left to do, as far as the log knows."""
    graph, state = execution.program.graph, execution.state
    for step in region.order:
        source = graph.fed_by(step)
        if state.end_of(step, VISIT) is None and (source is None or _is_taken(state, source)):
            return False
    return True


class _Walk:
    """Who drives the source of a stream drives all of it: others begin when it is driven here, or has ended."""

    def __init__(self, steps: Steps, execution: Execution) -> None:
        self._steps = steps
        self._execution = execution

    async def step(self, name: str) -> None:
        """Runs a step, and beside it those that take its chunks."""
        takers = self._execution.program.graph.streams_to(name)
        if not takers:
            await self._run(name)
            return
        async with (
            self._steps.streaming(self._execution, name, takers) as stream,
            asyncio.TaskGroup() as group,
        ):
            begun = False

            async def take(taker: str) -> None:
                await self._steps.refresh(self._execution, name, stream)
                try:
                    await self.step(taker)
                finally:
                    stream.leave(taker)

            def begin() -> None:
                nonlocal begun
                begun = True
                stream.begin()
                for taker in takers:
                    group.create_task(take(taker))

            end = await self._run(name, begin)
            await self._steps.refresh(self._execution, name, stream)
            stream.end(failed=end is None or end.status is not StepStatus.COMPLETED)
            if not begun and end is not None and end.status is StepStatus.COMPLETED:
                begin()

    async def leave_out(self, steps: tuple[str, ...]) -> None:
        """Ends those that took chunks of a step whose failure an arc took: they do nothing more, and lead nowhere."""
        state, program = self._execution.state, self._execution.program
        for step in steps:
            source = program.graph.fed_by(step)
            if source is None or state.end_of(step, VISIT) is not None or step not in state.visits:
                continue
            if state.end_of(source, VISIT) is not None and not _is_taken(state, source):
                await self._steps.skip(self._execution, program.step(step), VISIT)

    async def _run(self, step: str, entered: Callable[[], None] | None = None) -> StepEnd | None:
        """How a step ended; None where its source failed, and its own end is not known."""
        try:
            return await self._steps.run(self._execution, step, VISIT, entered=entered)
        except StreamBrokenError:
            return None


def _is_taken(state: ExecutionState, source: str) -> bool:
    """Whether chunks of a step are for others to take: unless it ended without success, and nobody resumes it."""
    end = state.end_of(source, VISIT)
    return end is None or end.unhandled or end.status is StepStatus.COMPLETED


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
