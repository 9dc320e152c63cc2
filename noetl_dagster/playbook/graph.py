"""Analyses the arcs of a playbook: successors, reachable steps, and steps that run together.

A cycle (a strongly connected component, or a step with an arc to itself) is one region, and so are steps joined by
arcs ``on: call.partial``, which run side by side; every other step is a region of its own. Regions come in
topological order. All of it takes linear time and no recursion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from noetl_dagster.playbook.models import Playbook


@dataclass(frozen=True, slots=True)
class Region:
    """One step, or the steps of one cycle or stream.

    Attributes:
        name: the step's name, or ``region_<entry step>`` of several.
        steps: in playbook order.
        entries: steps that an arc from outside reaches, or where the playbook starts.
        targets: steps outside that an arc from here reaches.
        order: the steps forward from the entries; an arc that leads back in it begins a new round.
        is_stream: its steps take each other's chunks while they are made.
    """

    name: str
    steps: tuple[str, ...]
    is_cycle: bool
    entries: tuple[str, ...]
    targets: tuple[str, ...]
    order: tuple[str, ...]
    is_stream: bool = False

    @property
    def is_joint(self) -> bool:
        """Reports whether its steps are walked together, in one op."""
        return self.is_cycle or self.is_stream


class StepGraph:
    """The arcs of a playbook. Arcs to unknown steps are left out; the checks report them."""

    def __init__(self, playbook: Playbook) -> None:
        names = [step.name for step in playbook.steps]
        self.entry = playbook.entry.name
        self._position = {name: place for place, name in enumerate(names)}
        self._successors = {step.name: self._known(step.targets) for step in playbook.steps}
        self._predecessors: dict[str, list[str]] = {name: [] for name in names}
        for name, targets in self._successors.items():
            for target in targets:
                self._predecessors[target].append(name)
        self._streams = {step.name: self._known(step.streams_to) for step in playbook.steps}
        self._fed_by = {target: name for name, targets in self._streams.items() for target in targets}
        self.reachable = self._reachable()
        # Tarjan's algorithm gives a component only after all that it leads to
        self.regions = tuple(self._region(component) for component in reversed(list(self._components())))
        self._by_name = {region.name: region for region in self.regions}
        self._region_of = {step: region for region in self.regions for step in region.steps}

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def _known(self, steps: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in steps if name in self._position)

    def predecessors(self, name: str) -> tuple[str, ...]:
        """Returns the steps that have an arc to a step."""
        return tuple(self._predecessors[name])

    def streams_to(self, name: str) -> tuple[str, ...]:
        """Steps that take the chunks of a step while they are made."""
        return self._streams[name]

    def fed_by(self, name: str) -> str | None:
        """Returns the step whose chunks a step takes while they are made."""
        return self._fed_by.get(name)

    def region_of(self, step: str) -> Region:
        """Returns the region of a step."""
        return self._region_of[step]

    def region(self, name: str) -> Region:
        """Returns a region by its name."""
        return self._by_name[name]

    def _reachable(self) -> frozenset[str]:
        seen = {self.entry}
        waiting = [self.entry]
        while waiting:
            for target in self._successors[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return frozenset(seen)

    # Ours: networkx takes as long to import as a whole check takes, graphlib knows no components, and where several
    # orders are right rustworkx chooses another one, which the names of regions and ops would follow.
    def _components(self) -> Iterator[list[str]]:
        """Yields strongly connected components, each after its successors (Tarjan 1972, with an explicit stack)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        work: list[tuple[str, Iterator[str]]] = []

        def enter(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            source = self._fed_by.get(name)  # the two ends of a stream belong to one component
            joined = self._successors[name] if source is None else (*self._successors[name], source)
            work.append((name, iter(reversed(joined))))

        # the entry first, then backwards, so that the reversed result follows the order of the playbook
        for root in (self.entry, *reversed(self._position)):
            if root not in index:
                enter(root)
            while work:
                name, targets = work[-1]
                for target in targets:
                    if target not in index:
                        enter(target)
                        break
                    low[name] = min(low[name], low[target])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[name])
                    if low[name] == index[name]:
                        component = [stack.pop()]
                        while component[-1] != name:
                            component.append(stack.pop())
                        low.update(dict.fromkeys(component, len(self._position)))  # above all that are open
                        yield component

    def _region(self, component: list[str]) -> Region:
        steps = tuple(sorted(component, key=self._position.__getitem__))
        inside = set(steps)
        entries = tuple(name for name in steps if name == self.entry or not inside.issuperset(self._predecessors[name]))
        outside = (one for name in steps for one in self._successors[name] if one not in inside)
        targets = tuple(dict.fromkeys(outside))
        is_stream = any(target in inside for name in steps for target in self._streams[name])
        is_cycle = not is_stream and (len(steps) > 1 or steps[0] in self._successors[steps[0]])
        name = f"region_{(entries or steps)[0]}" if is_cycle or is_stream else steps[0]
        order = self._forward(entries or steps[:1], inside)
        return Region(name, steps, is_cycle, entries, targets, order, is_stream)

    def _forward(self, entries: tuple[str, ...], inside: set[str]) -> tuple[str, ...]:
        """Returns the steps of a region in reverse postorder: only arcs that close a cycle lead back."""
        seen: set[str] = set()
        finished: list[str] = []
        for entry in reversed(entries):
            work = [] if entry in seen else [(entry, iter(reversed(self._successors[entry])))]
            seen.add(entry)
            while work:
                name, targets = work[-1]
                target = next((one for one in targets if one in inside and one not in seen), None)
                if target is None:
                    finished.append(name)
                    work.pop()
                else:
                    seen.add(target)
                    work.append((target, iter(reversed(self._successors[target]))))
        return tuple(reversed(finished))


def have_same_steps_and_arcs(one: Playbook, other: Playbook) -> bool:
    """Reports whether two texts have the same steps, arcs and ways to run them; the steps' tasks may differ."""
    if one is other or one.source == other.source:
        return True
    shapes = [
        {step.name: (step.targets, step.streams_to, step.is_fanout) for step in playbook.steps}
        for playbook in (one, other)
    ]
    return one.entry.name == other.entry.name and shapes[0] == shapes[1]


def with_ends_as_assets(playbook: Playbook) -> Playbook:
    """Adds the ends of branches as assets, since Dagster's graphs of assets end in assets.

    A playbook whose steps are all plumbing stays as it is: it becomes a job without assets.
    """
    plumbing = {step.name for step in playbook.steps if not step.is_asset}
    if not plumbing or len(plumbing) == len(playbook.steps):
        return playbook
    ends = {
        region.steps[-1]
        for region in StepGraph(playbook).regions
        if not region.targets and plumbing.issuperset(region.steps)
    }
    if not ends:
        return playbook
    steps = [one.model_copy(update={"is_asset": True}) if one.name in ends else one for one in playbook.steps]
    return playbook.model_copy(update={"steps": tuple(steps)})
