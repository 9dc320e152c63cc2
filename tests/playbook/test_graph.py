"""Regions, order and reachability, against a plain definition on random graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Arc, Metadata, Playbook, Routing, Step
from tests.playbook.playbooks import errors_of


def playbook(arcs: dict[str, list[str]]) -> Playbook:
    steps = tuple(
        Step(name=name, routing=Routing(arcs=tuple(Arc(step=target) for target in targets)))
        for name, targets in arcs.items()
    )
    return Playbook(metadata=Metadata(name="g", path="g"), steps=steps)


def test_a_line_is_its_own_order() -> None:
    graph = StepGraph(playbook({"a": ["b"], "b": ["c"], "c": []}))
    assert graph.entry == "a"
    assert [region.name for region in graph.regions] == ["a", "b", "c"]
    assert not any(region.is_cycle for region in graph.regions)
    assert graph.predecessors["b"] == ["a"]
    assert graph.region_of["b"].targets == ("c",)
    assert graph.regions[0].targets == ("b",)


def test_branches_and_join_keep_the_playbooks_order() -> None:
    graph = StepGraph(playbook({"start": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}))
    assert [region.name for region in graph.regions] == ["start", "b", "c", "d"]
    assert graph.predecessors["d"] == ["b", "c"]


def test_a_cycle_is_one_region() -> None:
    graph = StepGraph(playbook({"start": ["poll"], "poll": ["wait", "end"], "wait": ["poll"], "end": []}))
    assert [region.name for region in graph.regions] == ["start", "region_poll", "end"]
    region = graph.region_of["wait"]
    assert region.steps == ("poll", "wait")
    assert region.is_cycle
    assert region.entries == ("poll",)
    assert region.targets == ("end",)


def test_an_arc_to_itself_is_a_cycle() -> None:
    graph = StepGraph(playbook({"start": ["start"]}))
    assert graph.regions[0].is_cycle
    assert graph.regions[0].name == "region_start"


def test_islands_are_regions_that_are_not_reached() -> None:
    graph = StepGraph(playbook({"a": [], "x": ["y"], "y": ["x"]}))
    assert graph.reachable == {"a"}
    assert {region.name for region in graph.regions} == {"a", "region_x"}


def test_arcs_to_unknown_steps_are_left_out() -> None:
    assert StepGraph(playbook({"a": ["nope"]})).region_of["a"].targets == ()


GRAPHS = st.integers(1, 8).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=4, unique=True), min_size=size, max_size=size)
)


@given(GRAPHS)
def test_regions_are_the_strongly_connected_components_in_topological_order(lists: list[list[int]]) -> None:
    arcs = {f"s{number}": [f"s{target}" for target in targets] for number, targets in enumerate(lists)}
    graph = StepGraph(playbook(arcs))
    reach = {name: _reach(arcs, name) for name in arcs}
    for first in arcs:
        for second in arcs:
            together = first == second or (second in reach[first] and first in reach[second])
            assert (graph.region_of[first] is graph.region_of[second]) is together
    assert sorted(step for region in graph.regions for step in region.steps) == sorted(arcs)
    order = {step: place for place, region in enumerate(graph.regions) for step in region.steps}
    for name, targets in arcs.items():
        assert all(order[name] <= order[target] for target in targets)
    assert graph.reachable == reach["s0"] | {"s0"}
    for region in graph.regions:
        assert region.is_cycle is any(name in reach[name] for name in region.steps)


def _reach(arcs: dict[str, list[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(arcs[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += arcs[name]
    return seen


@pytest.mark.parametrize("closed", [False, True])
def test_long_chains_need_no_recursion(closed: bool) -> None:
    names = [f"s{number}" for number in range(20_000)]
    arcs = {name: [follower] for name, follower in pairwise(names)} | {names[-1]: [names[0]] if closed else []}
    big = playbook(arcs)
    graph = StepGraph(big)
    assert len(graph.regions) == (1 if closed else len(names))
    assert graph.regions[0].name == ("region_s0" if closed else "s0")


def test_fan_out_outside_a_cycle_is_fine() -> None:
    steps = """
        - step: start
          tool: {kind: noop}
          loop: {in: [1], iterator: x}
          spec: {loop_mode: fanout}
          next: end
        - step: end
          tool: {kind: noop}
          next: [{step: end, when: "{{ ctx.more }}"}]
        """
    assert errors_of(steps) == []
