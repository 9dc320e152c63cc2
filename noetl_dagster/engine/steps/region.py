"""Cycles between steps: one region of the graph, walked token by token in one op (DESIGN section 3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.events.state import StepEnd
from noetl_dagster.playbook.graph import Region
from noetl_dagster.worker.execution import Execution

Token = tuple[int, int]
"""Round of the cycle, from 0, and place of the step in the region's forward order."""


@dataclass(slots=True)
class TokenQueue:
    """Steps of a region that wait for their next visit: earlier rounds first, then in forward order.

    An arc that leads back begins the next round. Several arcs that fire into one step in the same round make
    one visit of it, after everything that may still reach it in that round: the join barrier inside a cycle.
    The queue is a function of the log, so a restarted region goes on where it stopped.
    """

    region: Region
    places: dict[str, int]
    waiting: list[Token] = field(default_factory=list)
    visits: dict[str, int] = field(default_factory=dict)
    outward: dict[str, None] = field(default_factory=dict)
    taken: Token = (0, -1)

    @classmethod
    def replay(cls, execution: Execution, region: Region) -> TokenQueue:
        """The queue as the log leaves it: tokens that came in, less the visits that ended."""
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
        return bool(self.waiting)

    @property
    def next_step(self) -> str:
        return self.region.order[self.waiting[0][1]]

    def next_visit(self, step: str) -> int:
        return self.visits.get(step, 0) + 1

    def add(self, targets: Iterable[str]) -> None:
        """Takes tokens: those for steps outside go out when the region has ended."""
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
        """The next step to visit and the number of the visit."""
        step = self.next_step
        self.taken = heappop(self.waiting)
        self.visits[step] = self.next_visit(step)
        return step, self.visits[step]

    def ended(self, end: StepEnd) -> None:
        """Takes the tokens of the visit that was taken last."""
        self.add(end.fired)


def incoming(execution: Execution, region: Region) -> list[str]:
    """Steps of a region that arcs from outside fired into, each once; the entry of the playbook."""
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
