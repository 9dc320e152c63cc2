"""Regions: steps that form a cycle or a stream, which run in one op."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from noetl_dagster.engine.loops.stream import StreamBrokenError
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.events.state import ExecutionState, StepEnd, StepStatus
from noetl_dagster.playbook.graph import Region
from noetl_dagster.worker.execution import Execution

Token = tuple[int, int]
"""Round of the cycle, from 0, and place of the step in the region's forward order."""


@dataclass(slots=True)
class TokenQueue:
    """Steps of a region that wait for their next visit: earlier rounds first, then in forward order.

    An arc that leads back begins the next round. Several arcs that fire into one step in the same round make
    one visit of it, after everything that may still reach it in that round: the join barrier inside a cycle.
    The queue is a function of the log, so a restarted region resumes where it stopped.
    """

    region: Region
    places: dict[str, int]
    waiting: list[Token] = field(default_factory=list)
    visits: dict[str, int] = field(default_factory=dict)
    outward: dict[str, None] = field(default_factory=dict)
    taken: Token = (0, -1)

    @classmethod
    def replay(cls, execution: Execution, region: Region) -> TokenQueue:
        """Rebuilds the queue from the log: tokens that came in, without the visits that ended."""
        queue = cls(region, {step: place for place, step in enumerate(region.order)})
        queue.add(incoming(execution, region))
        while queue.waiting:
            step = queue.next_step
            end = execution.state.end_of(step, queue.next_visit(step))
            if end is None:
                break
            queue.take()
            queue.ended(end)
        return queue

    @property
    def has_pending(self) -> bool:
        """Reports that a step waits."""
        return bool(self.waiting)

    @property
    def next_step(self) -> str:
        """The step to visit next."""
        return self.region.order[self.waiting[0][1]]

    def next_visit(self, step: str) -> int:
        """Returns the number of the next visit of a step."""
        return self.visits.get(step, 0) + 1

    def add(self, targets: Iterable[str]) -> None:
        """Adds tokens. Those of steps outside leave the region when it has ended."""
        round_, source = self.taken
        for target in targets:
            place = self.places.get(target)
            if place is None:
                self.outward[target] = None
                continue
            token = (round_ if place > source else round_ + 1, place)
            if token not in self.waiting:
                heappush(self.waiting, token)

    def take(self) -> tuple[str, int]:
        """Returns the next step to visit and the number of the visit."""
        step = self.next_step
        self.taken = heappop(self.waiting)
        self.visits[step] = self.next_visit(step)
        return step, self.visits[step]

    def ended(self, end: StepEnd) -> None:
        """Adds the tokens of the visit that was taken last."""
        self.add(end.fired)


def incoming(execution: Execution, region: Region) -> list[str]:
    """Returns the steps of a region that arcs from outside fired into, each once, and the playbook's entry."""
    inside = frozenset(region.steps)
    tokens = {execution.playbook.entry.name: None} if execution.playbook.entry.name in inside else {}
    for end in execution.state.ends.values():
        if end.step not in inside:
            tokens |= {target: None for target in end.fired if target in inside}
    return list(tokens)


async def run_region(steps: Steps, execution: Execution, region: Region) -> tuple[list[str], StepEnd | None]:
    """Walks a cyclic region until no token is left in it.

    Returns:
        The steps outside that its arcs fired into, and the failure that ended it early, if any.
    """
    queue = TokenQueue.replay(execution, region)
    while queue.has_pending:
        step, visit = queue.take()
        end = await steps.run(execution, step, visit)
        if end.unhandled:
            return list(queue.outward), end
        queue.ended(end)
    return list(queue.outward), None


VISIT = 1
"""A stream is part of no cycle: each of its steps is visited once."""


async def run_streams(steps: Steps, execution: Execution, region: Region) -> tuple[list[str], StepEnd | None]:
    """Runs the source of a stream and, at the same time, the steps that consume its chunks directly or indirectly.

    Returns:
        The steps outside that its arcs fired into, and an unhandled failure, if there is one.
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
    """Reports that the log has the end of every step of a stream."""
    graph, state = execution.program.graph, execution.state
    for step in region.order:
        source = graph.fed_by(step)
        if state.end_of(step, VISIT) is None and (source is None or _is_taken(state, source)):
            return False
    return True


class _Walk:
    """The process that drives the source of a stream drives all of it. Consumers begin with it."""

    def __init__(self, steps: Steps, execution: Execution) -> None:
        self._steps = steps
        self._execution = execution

    async def step(self, name: str) -> None:
        """Runs a step and, at the same time, those that consume its chunks."""
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
        """Skips the consumers of a step whose failure an arc handled: none of their arcs fires."""
        state, program = self._execution.state, self._execution.program
        for step in steps:
            source = program.graph.fed_by(step)
            if source is None or state.end_of(step, VISIT) is not None or step not in state.visits:
                continue
            if state.end_of(source, VISIT) is not None and not _is_taken(state, source):
                await self._steps.skip(self._execution, program.step(step), VISIT)

    async def _run(self, step: str, entered: Callable[[], None] | None = None) -> StepEnd | None:
        """Runs a step and returns its end; None if its source failed, since its own end is then not known."""
        try:
            return await self._steps.run(self._execution, step, VISIT, entered=entered)
        except StreamBrokenError:
            return None


def _is_taken(state: ExecutionState, source: str) -> bool:
    """Reports that other steps consume a step's chunks: not if it ended without success and is not resumed."""
    end = state.end_of(source, VISIT)
    return end is None or end.unhandled or end.status is StepStatus.COMPLETED


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
