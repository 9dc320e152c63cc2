"""Cycles between steps: one region of the graph, walked token by token in one op (DESIGN section 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from noetl_dagster.engine.step import Steps
from noetl_dagster.events.state import StepEnd
from noetl_dagster.playbook.graph import Region
from noetl_dagster.worker.execution import Execution


@dataclass(slots=True)
class TokenQueue:
    """Steps of a region that wait for their next visit, first in first out.

    Several arcs that fire into one waiting step make one visit of it: the join barrier inside a cycle.
    The queue is a function of the log, so a restarted region goes on where it stopped.
    """

    region: Region
    waiting: deque[str] = field(default_factory=deque)
    visits: dict[str, int] = field(default_factory=dict)
    outward: dict[str, None] = field(default_factory=dict)

    @classmethod
    def replay(cls, execution: Execution, region: Region) -> TokenQueue:
        """The queue as the log leaves it: tokens that came in, less the visits that ended."""
        queue = cls(region)
        queue.add(incoming(execution, region))
        while queue.waiting:
            end = execution.state.end_of(queue.waiting[0], queue.next_visit(queue.waiting[0]))
            if end is None:
                break
            queue.take()
            queue.ended(end)
        return queue

    @property
    def has_pending(self) -> bool:
        return bool(self.waiting)

    def next_visit(self, step: str) -> int:
        return self.visits.get(step, 0) + 1

    def add(self, targets: Iterable[str]) -> None:
        """Takes tokens: those for steps outside go out when the region has ended."""
        for target in targets:
            if target not in self.region.steps:
                self.outward[target] = None
            elif target not in self.waiting:
                self.waiting.append(target)

    def take(self) -> tuple[str, int]:
        """The next step to visit and the number of the visit."""
        step = self.waiting.popleft()
        self.visits[step] = self.next_visit(step)
        return step, self.visits[step]

    def ended(self, end: StepEnd) -> None:
        self.add(end.fired)


def incoming(execution: Execution, region: Region) -> list[str]:
    """Steps of a region that arcs from outside fired into, in the order of firing; the entry of the playbook."""
    tokens = []
    if execution.playbook.entry.name in region.steps:
        tokens.append(execution.playbook.entry.name)
    state = execution.state
    ends = sorted(state.ends.values(), key=lambda end: end.event_id)
    for end in ends:
        if end.step not in region.steps:
            tokens.extend(target for target in end.fired if target in region.steps)
    return list(dict.fromkeys(tokens))


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
