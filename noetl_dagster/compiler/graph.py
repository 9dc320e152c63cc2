"""A playbook as one Dagster graph: ops joined by tokens, the results as its outputs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    DependencyDefinition,
    GraphDefinition,
    InputMapping,
    MultiDependencyDefinition,
    NodeInvocation,
    OpDefinition,
    OutputMapping,
)

from noetl_dagster.compiler.config import workload_mapping
from noetl_dagster.compiler.lineage.tables import Writers
from noetl_dagster.compiler.names import FANIN_SUFFIX, GROUP_SUFFIX, asset_key, dagster_name, unique_names
from noetl_dagster.compiler.ops import EXPANDED, GROUPS, RESULT, TOKENS_IN, OpMaker, arc_output, check_output
from noetl_dagster.compiler.readings import Partitioned, Reading, readings_of
from noetl_dagster.compiler.specs import check_specs
from noetl_dagster.dagster_internals import DynamicCollectDependencyDefinition
from noetl_dagster.playbook.graph import Region, StepGraph
from noetl_dagster.playbook.models import Playbook


@dataclass(frozen=True, slots=True)
class PlaybookGraph:
    """A compiled playbook.

    Attributes:
        definition: the graph; the result of each step that is an asset is an output of it.
        results: graph output of each such step, by step name.
        steps: reachable steps, in playbook order.
        readings: assets outside of the playbook that steps read; each is an input of the graph.
    """

    definition: GraphDefinition
    results: dict[str, str]
    steps: tuple[str, ...]
    readings: tuple[Reading, ...] = ()


def build_graph(playbook: Playbook, graph: StepGraph, made: Partitioned, writers: Writers) -> PlaybookGraph:
    """Builds the graph of the steps that can be reached; the others would run at once in Dagster."""
    regions = [region for region in graph.regions if region.steps[0] in graph.reachable]
    reachable = [step.name for step in playbook.steps if step.name in graph.reachable]
    step_names = unique_names(reachable)
    names = {
        region.name: f"region_{step_names[region.name.removeprefix('region_')]}"
        if region.is_joint
        else step_names[region.steps[0]]
        for region in regions
    }
    entry = graph.region_of(playbook.entry.name).name
    graph_name = graph_name_of(playbook)
    readings = tuple(readings_of(playbook, tuple(reachable), made))
    maker = OpMaker(playbook, names, step_names, entry, prefix=graph_name, readings=readings, writers=writers)
    ops = [op for region in regions for op in maker.step_ops(region)]
    results = {step: f"{RESULT}__{step_names[step]}" for step in reachable if playbook.step(step).is_asset}
    definition = GraphDefinition(
        name=graph_name,
        description=playbook.metadata.description or None,
        node_defs=ops,
        dependencies=_as_nodes(ops, graph_name, _dependencies(playbook, graph, regions, names, step_names)),
        input_mappings=[
            InputMapping(
                graph_input_name=reading.input,
                mapped_node_name=names[graph.region_of(step).name],
                mapped_node_input_name=reading.input,
            )
            for reading in readings
            for step in _first_of_regions(graph, reading.steps)
        ],
        output_mappings=[
            mapping
            for region in regions
            for mapping in _mappings(playbook, region, names, step_names, results)
        ],
        config=workload_mapping(playbook, names[entry]),
    )
    return PlaybookGraph(definition, results, tuple(reachable), readings)


def _first_of_regions(graph: StepGraph, steps: tuple[str, ...]) -> list[str]:
    """One step of each region that any of the steps is in: a region is one op."""
    return list({graph.region_of(step).name: step for step in reversed(steps)}.values())


def graph_name_of(playbook: Playbook) -> str:
    """Name of the graph, under which the workload stands in run config. The job has the bare name."""
    return f"{dagster_name(playbook.name)}_playbook"


def asset_deps(playbook: Playbook, graph: StepGraph, compiled: PlaybookGraph) -> dict[str, set[AssetKey]]:
    """Lineage along the arcs, by graph output. Inside a cycle only arcs that lead forward count.

    Steps that are no assets are passed through: what leads to them leads to what comes after them.
    """
    position = {step: place for place, step in enumerate(compiled.steps)}
    read = {step: {one.key for one in compiled.readings if step in one.steps} for step in compiled.steps}
    deps: dict[str, set[AssetKey]] = {}
    for step in compiled.results:
        keys: set[AssetKey] = set()
        waiting, seen = [step], {step}
        while waiting:
            at = waiting.pop()
            keys |= read[at]
            ring = region.steps if (region := graph.region_of(at)).is_cycle else ()
            for source in graph.predecessors(at):
                backwards = source in ring and position.get(source, 0) >= position[at]
                if source in seen or source not in position or backwards:
                    continue
                seen.add(source)
                if playbook.step(source).is_asset:
                    keys.add(asset_key(playbook, source))
                else:
                    waiting.append(source)
        deps[compiled.results[step]] = keys
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
            mapped_node_output_name=f"{RESULT}_{step_names[step]}" if region.is_joint else RESULT,
        )
        for step in region.steps
        if step in results
    ] + [
        OutputMapping(
            graph_output_name=spec.get_python_identifier(),
            mapped_node_name=source,
            mapped_node_output_name=check_output(step_names[step], spec.name),
        )
        for step in region.steps
        if step in results
        for spec in check_specs(playbook, playbook.step(step))
    ]


def _routing_op(playbook: Playbook, region: Region, names: dict[str, str]) -> str:
    """The op of a region that has its result and arcs."""
    suffix = FANIN_SUFFIX if _is_fanout(playbook, region) else ""
    return names[region.name] + suffix


def _is_fanout(playbook: Playbook, region: Region) -> bool:
    return not region.is_joint and playbook.step(region.steps[0]).is_fanout
