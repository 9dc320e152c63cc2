"""A playbook as one Dagster graph: ops joined by tokens, the results as its outputs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dagster import Any as AnyType
from dagster import (
    Array,
    ConfigMapping,
    DependencyDefinition,
    Field,
    GraphDefinition,
    InputMapping,
    MultiDependencyDefinition,
    NodeInvocation,
    Noneable,
    OutputMapping,
    Permissive,
)

from noetl_dagster.compiler.ops import EXPANDED, GROUPS, TOKENS_IN, WORKLOAD, ops_of
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan
from noetl_dagster.dagster_internals import DynamicCollectDependencyDefinition


def build_graph(plan: PlaybookPlan) -> GraphDefinition:
    """Builds the graph of a playbook; the result of each step that is an asset is an output of it."""
    ops = [op for region in plan.regions for op in ops_of(plan, region)]
    dependencies = _dependencies(plan)
    # ops of different playbooks differ in name; in its graph each has the step's name alone
    aliases = {op.name: op.name.removeprefix(f"{plan.graph_name}__") for op in ops}
    return GraphDefinition(
        name=plan.graph_name,
        description=plan.description,
        node_defs=ops,
        dependencies={
            NodeInvocation(name, alias=alias): dependencies.get(alias, {}) for name, alias in aliases.items()
        },
        input_mappings=[
            InputMapping(
                graph_input_name=reading.input,
                mapped_node_name=region.op,
                mapped_node_input_name=reading.input,
            )
            for region in plan.regions
            for reading in region.readings
        ],
        output_mappings=[mapping for region in plan.regions for mapping in _output_mappings(region)],
        config=_workload_mapping(plan),
    )


def _dependencies(plan: PlaybookPlan) -> dict[str, dict[str, Any]]:
    """Wires one fan-in input for each region: Dagster waits until every arc into it has fired or been left out."""
    op_of = {name: region.op for region in plan.regions for name in region.names}
    tokens: dict[str, list[DependencyDefinition]] = defaultdict(list)
    for region in plan.regions:
        for target in region.targets:
            tokens[op_of[target.step.name]].append(DependencyDefinition(region.routing_op, target.arc))
    dependencies: dict[str, dict[str, Any]] = {
        name: {TOKENS_IN: MultiDependencyDefinition(sources)} for name, sources in tokens.items()
    }
    for region in plan.regions:
        if region.is_fanout:
            dependencies[region.group_op] = {"group": DependencyDefinition(region.op, GROUPS)}
            dependencies[region.routing_op] = {
                EXPANDED: DependencyDefinition(region.op, EXPANDED),
                GROUPS: DynamicCollectDependencyDefinition(region.group_op, "done"),
            }
    return dependencies


def _output_mappings(region: RegionPlan) -> list[OutputMapping]:
    outputs = {step.output: step.result for step in region.assets} | {
        check.get_python_identifier(): step.check_output(check.name)
        for step in region.assets
        for check in step.checks
    }
    return [
        OutputMapping(
            graph_output_name=name, mapped_node_name=region.routing_op, mapped_node_output_name=output
        )
        for name, output in outputs.items()
    ]


def _workload_mapping(plan: PlaybookPlan) -> ConfigMapping:
    """Maps the workload as run config of the graph to the op that starts the execution.

    The Launchpad shows its keys with their defaults. Keys that the playbook does not have are accepted: child playbooks
    and templates may use them.
    """
    workload, entry = plan.playbook.workload, plan.entry.op

    def to_entry(config: dict[str, Any]) -> dict[str, Any]:
        changed = {key: value for key, value in config.items() if workload.get(key) != value}
        return {entry: {"config": {WORKLOAD: changed}}}

    fields = {
        str(key): Field(_type_of(default), default_value=default, is_required=False)
        for key, default in workload.items()
    }
    return ConfigMapping(config_fn=to_entry, config_schema=Permissive(fields))


def _type_of(default: Any) -> Any:
    """Returns the config type of a default; text may hold a template, which accepts any value."""
    if isinstance(default, bool | int | float):
        return type(default)
    if isinstance(default, str) and "{{" not in default:
        return str
    if isinstance(default, list) and default and all(isinstance(item, str) for item in default):
        return Array(str)
    return Permissive() if isinstance(default, dict) else Noneable(AnyType)
