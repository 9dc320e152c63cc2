"""Analyses the arcs of a playbook: successors, reachable steps, and steps that run together.

A cycle (a strongly connected component, or a step with an arc to itself) is one region, and so are steps joined by
arcs ``on: call.partial``, which run side by side; every other step is a region of its own. Regions come in
topological order. All of it takes linear time and no recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The arcs of a playbook. Arcs to unknown steps are left out; the checks report them.

    Attributes:
        predecessors: by step, the steps that have an arc to it.
        streams_to: by step, those that take its chunks while they are made.
        fed_by: by step, the one whose chunks it takes while they are made; other steps are left out.
        regions: in topological order.
        by_name: regions by their names.
        region_of: by step, its region.
    """

    def __init__(self, playbook: Playbook) -> None:
        names = [step.name for step in playbook.steps]
        self.entry = playbook.entry.name
        self._position = {name: place for place, name in enumerate(names)}
        self._successors = {step.name: self._known(step.targets) for step in playbook.steps}
        self.predecessors: dict[str, list[str]] = {name: [] for name in names}
        for name, targets in self._successors.items():
            for target in targets:
                self.predecessors[target].append(name)
        self.streams_to = {step.name: self._known(step.streams_to) for step in playbook.steps}
        self.fed_by = {target: name for name, targets in self.streams_to.items() for target in targets}
        self.reachable = frozenset(_postorder([self.entry], self._successors, set()))
        self.regions = tuple(map(self._region, self._components()))
        self.by_name = {region.name: region for region in self.regions}
        self.region_of = {step: region for region in self.regions for step in region.steps}

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def _known(self, steps: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in steps if name in self._position)

    # Ours: networkx takes as long to import as a whole check takes, graphlib knows no components, and where several
    # orders are right rustworkx chooses another one, which the names of regions and ops would follow.
    def _components(self) -> Iterator[list[str]]:
        """Yields strongly connected components, each before its successors (Kosaraju; Sharir 1981)."""
        forward = {name: [*reversed(targets)] for name, targets in self._successors.items()}
        backward = {name: [*sources] for name, sources in self.predecessors.items()}
        for target, source in self.fed_by.items():  # the two ends of a stream belong to one component
            forward[target].insert(0, source)
            backward[source].append(target)
        # the entry first, then backwards, so that the reversed result follows the order of the playbook
        finished = [*_postorder((self.entry, *reversed(self._position)), forward, set())]
        seen: set[str] = set()
        for name in reversed(finished):
            if name not in seen:
                yield [*_postorder([name], backward, seen)]

    def _region(self, component: list[str]) -> Region:
        steps = tuple(sorted(component, key=self._position.__getitem__))
        inside = set(steps)
        entries = tuple(name for name in steps if name == self.entry or not inside.issuperset(self.predecessors[name]))
        outside = (one for name in steps for one in self._successors[name] if one not in inside)
        targets = tuple(dict.fromkeys(outside))
        is_stream = any(target in inside for name in steps for target in self.streams_to[name])
        is_cycle = not is_stream and (len(steps) > 1 or steps[0] in self._successors[steps[0]])
        name = f"region_{(entries or steps)[0]}" if is_cycle or is_stream else steps[0]
        # reverse postorder: only arcs that close a cycle lead back
        own_targets = {name: [one for one in reversed(self._successors[name]) if one in inside] for name in steps}
        order = tuple(reversed([*_postorder(reversed(entries or steps[:1]), own_targets, set())]))
        return Region(name, steps, is_cycle, entries, targets, order, is_stream)


def _postorder(roots: Iterable[str], neighbours: Mapping[str, Sequence[str]], seen: set[str]) -> Iterator[str]:
    """Yields what the roots lead to and is not ``seen``, each after all that it leads to, except along a cycle."""
    for root in roots:
        work = [] if root in seen else [(root, iter(neighbours[root]))]
        seen.add(root)
        while work:
            name, unvisited = work[-1]
            target = next((one for one in unvisited if one not in seen), None)
            if target is None:
                work.pop()
                yield name
            else:
                seen.add(target)
                work.append((target, iter(neighbours[target])))


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
