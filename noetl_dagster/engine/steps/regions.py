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
from noetl_dagster.worker.execution import Execution, Visit

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
            queue.add(end.fired)
        return queue

    @property
    def next_step(self) -> str:
        """The step to visit next."""
        return self.region.order[self.waiting[0][1]]

    def next_visit(self, step: str) -> int:
        """Returns the number of the next visit of a step."""
        return self.visits.get(step, 0) + 1

    def add(self, targets: Iterable[str]) -> None:
        """Adds tokens of the visit that was taken last. Those of steps outside leave the region when it has ended."""
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
    while queue.waiting:
        end = await steps.run(execution, *queue.take())
        if end.unhandled:
            return list(queue.outward), end
        queue.add(end.fired)
    return list(queue.outward), None


VISIT = 1
"""A stream is part of no cycle: each of its steps is visited once."""


async def run_streams(steps: Steps, execution: Execution, region: Region) -> tuple[list[str], StepEnd | None]:
    """Runs the source of a stream and, at the same time, the steps that consume its chunks directly or indirectly.

    Returns:
        The steps outside that its arcs fired into, and an unhandled failure, if there is one.
    """
    state, program = execution.state, execution.program
    try:
        await _run_with_consumers(steps, execution, region.order[0])
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from errors
    # consumers of a step whose failure an arc handled: none of their arcs fires
    for step in region.order[1:]:
        source = program.graph.fed_by.get(step)
        if source is None or state.end_of(step, VISIT) is not None or step not in state.visits:
            continue
        if state.end_of(source, VISIT) is not None and not _is_taken(state, source):
            await steps.skip(Visit(execution, program.step(step), VISIT))
    ends = [end for step in region.order if (end := state.end_of(step, VISIT)) is not None]
    fired = dict.fromkeys(target for end in ends for target in end.fired)
    return list(fired), next((end for end in ends if end.unhandled), None)


def streams_are_over(execution: Execution, region: Region) -> bool:
    """Reports that the log has the end of every step of a stream."""
    graph, state = execution.program.graph, execution.state
    sources = (graph.fed_by.get(step) for step in region.order if state.end_of(step, VISIT) is None)
    return all(source is not None and not _is_taken(state, source) for source in sources)


async def _run_with_consumers(steps: Steps, execution: Execution, name: str) -> None:
    """Runs a step and, at the same time, those that consume its chunks.

    The process that drives the source of a stream drives all of it. Consumers begin with it.
    """
    consumers, streams = execution.program.graph.streams_to[name], steps.runtime.streams

    async def run(entered: Callable[[], None] | None = None) -> StepEnd | None:
        try:
            return await steps.run(execution, name, VISIT, entered=entered)
        except StreamBrokenError:  # its source failed, so its own end is not known
            return None

    if not consumers:
        await run()
        return
    ahead = steps.runtime.settings.chunks_ahead
    loops = ((consumer, execution.program.step(consumer).step.loop) for consumer in consumers)
    rooms = {consumer: ahead + (1 if loop is None else loop.max_in_flight) for consumer, loop in loops}
    with streams.open((execution.id, name, VISIT), rooms) as stream:
        async with asyncio.TaskGroup() as group:

            async def consume(consumer: str) -> None:
                await streams.refresh(stream)
                try:
                    await _run_with_consumers(steps, execution, consumer)
                finally:
                    stream.leave(consumer)

            def begin() -> None:
                stream.has_consumers = True
                for consumer in consumers:
                    group.create_task(consume(consumer))

            end = await run(begin)
            await streams.refresh(stream)
            completed = end is not None and end.status is StepStatus.COMPLETED
            stream.end(failed=not completed)
            if completed and not stream.has_consumers:
                begin()


def _is_taken(state: ExecutionState, source: str) -> bool:
    """Reports that other steps consume a step's chunks: not if it ended without success and is not resumed."""
    end = state.end_of(source, VISIT)
    return end is None or end.unhandled or end.status is StepStatus.COMPLETED
