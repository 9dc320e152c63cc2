"""One playbook as a graph-backed multi-asset, a job of the same name, and its schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from dagster import (
    AssetsDefinition,
    AssetSelection,
    AssetSpec,
    DefaultScheduleStatus,
    GraphDefinition,
    JobDefinition,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    define_asset_job,
)

from noetl_dagster.compiler.executors.noetl import noetl_executor
from noetl_dagster.compiler.graph import build_graph
from noetl_dagster.compiler.lineage.tables import Writers
from noetl_dagster.compiler.plan import PlaybookPlan, plan_playbook
from noetl_dagster.compiler.pod_tags import run_tags
from noetl_dagster.compiler.readings import PartitionsByAsset
from noetl_dagster.dagster_internals import UnresolvedAssetJobDefinition
from noetl_dagster.playbook.assets import ScheduleSpec, ScheduleStatus
from noetl_dagster.playbook.models import Playbook


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
        """The job's schedules."""
        return schedules_of(self.plan, self.job)


def compile_playbook(
    playbook: Playbook,
    made: PartitionsByAsset = MappingProxyType({}),
    specs: Mapping[str, AssetSpec] = MappingProxyType({}),
    writers: Writers | None = None,
) -> PlaybookJob:
    """Compiles a playbook to its assets and job.

    Args:
        made: partitions of the assets that other playbooks of the code location make.
        specs: Dagster's descriptions of assets, by step; default: from the playbook.
        writers: the assets whose steps write a table; default: those of the playbook itself.

    Raises:
        DagsterInvalidDefinitionError: never for a playbook that passed the checks of the loader.
    """
    plan = plan_playbook(playbook, made, specs, writers)
    graph = build_graph(plan)
    tags = {**plan.tags, **run_tags(playbook)}
    if not plan.assets:
        job = graph.to_job(
            plan.name,
            description=plan.description,
            tags=tags,
            executor_def=noetl_executor,
            partitions_def=plan.partitions.definition,
        )
        return PlaybookJob(plan, None, job)
    assets = _assets(plan, graph)
    asset_job = define_asset_job(
        plan.name,
        selection=AssetSelection.assets(*assets.keys),
        description=plan.description,
        tags=tags,
        executor_def=noetl_executor,
    )
    return PlaybookJob(plan, assets, asset_job)


def schedules_of(
    plan: PlaybookPlan, job: UnresolvedAssetJobDefinition | JobDefinition
) -> list[ScheduleDefinition]:
    """Builds the schedules of a playbook's job: one run at each tick, or one for each partition that is due."""
    return [_schedule(plan, spec, job) for spec in plan.playbook.dagster.schedules]


def _assets(plan: PlaybookPlan, graph: GraphDefinition) -> AssetsDefinition:
    specs = {step.output: step.spec for step in plan.assets if step.spec is not None}
    assets = AssetsDefinition.from_graph(
        graph,
        keys_by_input_name={reading.input: reading.key for reading in plan.readings},
        keys_by_output_name={step.output: step.key for step in plan.assets},
        internal_asset_deps=dict(plan.upstream),
        partitions_def=plan.partitions.definition,
        partition_mappings={one.input: one.mapping for one in plan.readings if one.mapping is not None},
        group_names_by_output_name={output: spec.group_name for output, spec in specs.items()},
        descriptions_by_output_name={
            output: spec.description for output, spec in specs.items() if spec.description
        },
        metadata_by_output_name={output: dict(spec.metadata) for output, spec in specs.items()},
        tags_by_output_name={output: dict(spec.tags) for output, spec in specs.items()},
        owners_by_output_name={output: list(spec.owners) for output, spec in specs.items()},
        code_versions_by_output_name={
            output: spec.code_version for output, spec in specs.items() if spec.code_version
        },
        automation_conditions_by_output_name={
            output: spec.automation_condition for output, spec in specs.items() if spec.automation_condition
        },
        check_specs=[check for step in plan.assets for check in step.checks],
    )
    fresh = {step.key: step.spec.freshness_policy for step in plan.assets if step.spec is not None}
    if not any(fresh.values()):
        return assets
    return assets.map_asset_specs(lambda spec: spec.replace_attributes(freshness_policy=fresh[spec.key]))


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
