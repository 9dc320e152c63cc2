"""One playbook as a graph of ops, a graph-backed multi-asset, a job of the same name, and its schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dagster import Any as AnyType
from dagster import (
    Array,
    AssetsDefinition,
    AssetSelection,
    AssetSpec,
    ConfigMapping,
    DefaultScheduleStatus,
    DependencyDefinition,
    Field,
    GraphDefinition,
    InputMapping,
    JobDefinition,
    MultiDependencyDefinition,
    NodeInvocation,
    Noneable,
    OutputMapping,
    Permissive,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    define_asset_job,
)

# private: collect() of dynamic outputs, in a graph that is made of definitions
from dagster._core.definitions.dependency import DynamicCollectDependencyDefinition

# private: the type of what define_asset_job returns
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from noetl_dagster.compiler.executors.noetl import noetl_executor
from noetl_dagster.compiler.lineage.tables import Writers
from noetl_dagster.compiler.ops import EXPANDED, GROUPS, TOKENS_IN, WORKLOAD, ops_of
from noetl_dagster.compiler.partitions import PartitionsByAsset
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan, plan_playbook
from noetl_dagster.compiler.specs import run_tags
from noetl_dagster.playbook.assets import ScheduleSpec, ScheduleStatus
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.workload import wanted_item_type, wanted_type

_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class PlaybookJob:
    """A playbook's Dagster definitions; a playbook whose steps are no assets has a job alone."""

    plan: PlaybookPlan
    assets: AssetsDefinition | None
    job: UnresolvedAssetJobDefinition | JobDefinition

    @property
    def playbook(self) -> Playbook:
        """The playbook from which it was compiled."""
        return self.plan.playbook

    @cached_property
    def schedules(self) -> list[ScheduleDefinition]:
        """The job's schedules: one run at each tick, or one for each partition that is due."""
        return [_schedule(self.plan, spec, self.job) for spec in self.playbook.dagster.schedules]


def compile_playbook(
    playbook: Playbook,
    made: PartitionsByAsset = MappingProxyType({}),
    specs: Mapping[str, AssetSpec] = MappingProxyType({}),
    writers: Writers | None = None,
) -> PlaybookJob:
    """Compiles a playbook to its assets and job, see :func:`noetl_dagster.compiler.plan.plan_playbook`.

    Raises:
        DagsterInvalidDefinitionError: never for a playbook that passed the checks of the loader.
    """
    plan = plan_playbook(playbook, made, specs, writers)
    graph = _graph(plan)
    described: dict[str, Any] = {
        "description": playbook.metadata.description or None,
        "tags": {**plan.tags, **run_tags(playbook)},
        "executor_def": noetl_executor,
    }
    if not plan.assets:
        job = graph.to_job(plan.name, partitions_def=plan.partitions.definition, **described)
        return PlaybookJob(plan, None, job)
    assets = _assets(plan, graph)
    selection = AssetSelection.assets(*plan.keys)
    return PlaybookJob(plan, assets, define_asset_job(plan.name, selection=selection, **described))


def _assets(plan: PlaybookPlan, graph: GraphDefinition) -> AssetsDefinition:
    assets = AssetsDefinition.from_graph(
        graph,
        keys_by_input_name={reading.input: reading.key for reading in plan.readings},
        keys_by_output_name={step.output: step.key for step in plan.assets},
        internal_asset_deps=dict(plan.upstream),
        partitions_def=plan.partitions.definition,
        partition_mappings={one.input: one.mapping for one in plan.readings if one.mapping is not None},
        check_specs=[check for step in plan.assets for check in step.checks],
    )
    specs = {step.key: step.spec for step in plan.assets if step.spec is not None}
    return assets.map_asset_specs(
        lambda wired: specs[wired.key].replace_attributes(deps=wired.deps, partitions_def=wired.partitions_def)
    )


def _schedule(
    plan: PlaybookPlan, spec: ScheduleSpec, job: UnresolvedAssetJobDefinition | JobDefinition
) -> ScheduleDefinition:
    config = plan.run_config(spec.workload)

    def requests(context: ScheduleEvaluationContext) -> Iterator[RunRequest | SkipReason]:
        moment = context.scheduled_execution_time
        if not plan.partitions.dimensions:
            yield RunRequest(run_key=moment.isoformat(), run_config=config)
            return
        keys = plan.partitions.due(moment, context.instance)
        if not keys:
            yield SkipReason("no partition is due")
        for key in keys:
            yield RunRequest(run_key=f"{key} {moment.isoformat()}", run_config=config, partition_key=key)

    running = spec.status is ScheduleStatus.RUNNING
    return ScheduleDefinition(
        name=f"{plan.name}_{spec.name}",
        job=job,
        cron_schedule=spec.cron,
        execution_timezone=spec.timezone,
        execution_fn=requests,
        default_status=DefaultScheduleStatus.RUNNING if running else DefaultScheduleStatus.STOPPED,
        description=f"{plan.playbook.metadata.path}: {spec.name}",
    )


def _graph(plan: PlaybookPlan) -> GraphDefinition:
    """Builds the graph of a playbook; the result of each step that is an asset is an output of it."""
    ops = [op for region in plan.regions for op in ops_of(plan, region)]
    dependencies = _dependencies(plan)
    # ops of different playbooks differ in name; in its graph each has the step's name alone
    aliases = {op.name: op.name.removeprefix(f"{plan.graph_name}__") for op in ops}
    return GraphDefinition(
        name=plan.graph_name,
        description=plan.playbook.metadata.description or None,
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
        check.get_python_identifier(): step.check_output(check.name) for step in region.assets for check in step.checks
    }
    return [
        OutputMapping(graph_output_name=name, mapped_node_name=region.routing_op, mapped_node_output_name=output)
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
    """Returns the config type of a default, see :func:`noetl_dagster.playbook.workload.check_types`."""
    if isinstance(default, list):
        items = wanted_item_type(default)
        return Array(items if items in _SCALARS else Noneable(AnyType))
    wanted = wanted_type(default)
    return wanted if wanted in _SCALARS else Permissive() if wanted is dict else Noneable(AnyType)
