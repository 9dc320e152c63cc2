"""A playbook as one Dagster graph: ops joined by tokens, the results as its outputs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    DependencyDefinition,
    GraphDefinition,
    MultiDependencyDefinition,
    NodeInvocation,
    OpDefinition,
    OutputMapping,
)

from noetl_dagster.compiler.config import workload_mapping
from noetl_dagster.compiler.names import FANIN_SUFFIX, GROUP_SUFFIX, asset_key, dagster_name, unique_names
from noetl_dagster.compiler.ops import EXPANDED, GROUPS, RESULT, TOKENS_IN, OpMaker, arc_output
from noetl_dagster.dagster_internals import DynamicCollectDependencyDefinition
from noetl_dagster.playbook.graph import Region, StepGraph
from noetl_dagster.playbook.models import Playbook


@dataclass(frozen=True, slots=True)
class PlaybookGraph:
    """A compiled playbook.

    Attributes:
        definition: the graph; each step's result is an output of it.
        results: graph output of each step, by step name.
        steps: reachable steps, in playbook order.
    """

    definition: GraphDefinition
    results: dict[str, str]
    steps: tuple[str, ...]


def build_graph(playbook: Playbook, graph: StepGraph) -> PlaybookGraph:
    """Builds the graph of the steps that can be reached; the others would run at once in Dagster."""
    regions = [region for region in graph.regions if region.steps[0] in graph.reachable]
    reachable = [step.name for step in playbook.steps if step.name in graph.reachable]
    step_names = unique_names(reachable)
    names = {
        region.name: f"region_{step_names[region.name.removeprefix('region_')]}"
        if region.is_cycle
        else step_names[region.steps[0]]
        for region in regions
    }
    entry = graph.region_of(playbook.entry.name).name
    graph_name = graph_name_of(playbook)
    maker = OpMaker(playbook, names, step_names, entry, prefix=graph_name)
    ops = [op for region in regions for op in maker.step_ops(region)]
    results = {step: f"{RESULT}__{step_names[step]}" for step in reachable}
    definition = GraphDefinition(
        name=graph_name,
        description=playbook.metadata.description or None,
        node_defs=ops,
        dependencies=_as_nodes(ops, graph_name, _dependencies(playbook, graph, regions, names, step_names)),
        output_mappings=[
            mapping
            for region in regions
            for mapping in _mappings(playbook, region, names, step_names, results)
        ],
        config=workload_mapping(playbook, names[entry]),
    )
    return PlaybookGraph(definition, results, tuple(reachable))


def graph_name_of(playbook: Playbook) -> str:
    """Name of the graph, under which the workload stands in run config. The job has the bare name."""
    return f"{dagster_name(playbook.name)}_playbook"


def asset_deps(playbook: Playbook, graph: StepGraph, compiled: PlaybookGraph) -> dict[str, set[AssetKey]]:
    """Lineage along the arcs, by graph output. Inside a cycle only arcs that lead forward count."""
    position = {step: place for place, step in enumerate(compiled.steps)}
    deps = {}
    for step in compiled.steps:
        region = graph.region_of(step)
        sources = {
            source
            for source in graph.predecessors(step)
            if source in position and (source not in region.steps or position[source] < position[step])
        }
        deps[compiled.results[step]] = {asset_key(playbook, source) for source in sources}
    return deps


def _dependencies(
    playbook: Playbook,
    graph: StepGraph,
    regions: list[Region],
    names: dict[str, str],
    step_names: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """One fan-in input a region: Dagster waits until every arc into it has fired or been left out."""
    tokens: dict[str, list[DependencyDefinition]] = defaultdict(list)
    for region in regions:
        source = _routing_op(playbook, region, names)
        for target in region.targets:
            into = names[graph.region_of(target).name]
            tokens[into].append(DependencyDefinition(source, arc_output(step_names[target])))
    dependencies: dict[str, dict[str, Any]] = {
        name: {TOKENS_IN: MultiDependencyDefinition(sources)} for name, sources in tokens.items()
    }
    for region in regions:
        if not _is_fanout(playbook, region):
            continue
        name = names[region.name]
        group, fanin = name + GROUP_SUFFIX, name + FANIN_SUFFIX
        dependencies[group] = {"group": DependencyDefinition(name, GROUPS)}
        dependencies[fanin] = {
            EXPANDED: DependencyDefinition(name, EXPANDED),
            GROUPS: DynamicCollectDependencyDefinition(group, "done"),
        }
    return dependencies


def _as_nodes(
    ops: list[OpDefinition], prefix: str, dependencies: dict[str, dict[str, Any]]
) -> dict[NodeInvocation, dict[str, Any]]:
    """Ops of different playbooks must differ in name; in its graph each goes by the step's name alone."""
    aliases = {op.name: op.name.removeprefix(f"{prefix}__") for op in ops}
    return {NodeInvocation(name, alias=alias): dependencies.get(alias, {}) for name, alias in aliases.items()}


def _mappings(
    playbook: Playbook,
    region: Region,
    names: dict[str, str],
    step_names: dict[str, str],
    results: dict[str, str],
) -> list[OutputMapping]:
    source = _routing_op(playbook, region, names)
    return [
        OutputMapping(
            graph_output_name=results[step],
            mapped_node_name=source,
            mapped_node_output_name=f"{RESULT}_{step_names[step]}" if region.is_cycle else RESULT,
        )
        for step in region.steps
    ]


def _routing_op(playbook: Playbook, region: Region, names: dict[str, str]) -> str:
    """The op of a region that has its result and arcs."""
    suffix = FANIN_SUFFIX if _is_fanout(playbook, region) else ""
    return names[region.name] + suffix


def _is_fanout(playbook: Playbook, region: Region) -> bool:
    return not region.is_cycle and playbook.step(region.steps[0]).is_fanout
