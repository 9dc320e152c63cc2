"""One playbook as a graph-backed multi-asset and a job of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dagster import (
    AssetsDefinition,
    AssetSelection,
    AssetSpec,
    JobDefinition,
    ScheduleDefinition,
    define_asset_job,
)

from noetl_dagster.compiler.executors.noetl import noetl_executor
from noetl_dagster.compiler.graph import PlaybookGraph, asset_deps, build_graph
from noetl_dagster.compiler.lineage.tables import PlaybookWriters, Writers
from noetl_dagster.compiler.names import asset_key, dagster_name, tag_key
from noetl_dagster.compiler.partitions import partitions_of, schedules_of
from noetl_dagster.compiler.pod_tags import run_tags
from noetl_dagster.compiler.readings import Partitioned
from noetl_dagster.compiler.specs import asset_spec, check_specs, condition_of
from noetl_dagster.dagster_internals import UnresolvedAssetJobDefinition
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Playbook

PLAYBOOK_TAG = "noetl/playbook"


@dataclass(frozen=True)
class PlaybookJob:
    """What a playbook becomes in Dagster: one whose steps are no assets, a job alone."""

    name: str
    playbook: Playbook
    assets: AssetsDefinition | None
    job: UnresolvedAssetJobDefinition | JobDefinition
    graph: PlaybookGraph

    @cached_property
    def schedules(self) -> list[ScheduleDefinition]:
        return schedules_of(self.playbook, self.job, self.run_config)

    def run_config(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run config that overrides keys of the workload."""
        if not workload:
            return {}
        config = {"config": workload}
        return {"ops": config if self.assets is None else {self.graph.definition.name: config}}


def compile_playbook(
    playbook: Playbook,
    made: Partitioned = MappingProxyType({}),
    specs: Mapping[str, AssetSpec] = MappingProxyType({}),
    writers: Writers | None = None,
) -> PlaybookJob:
    """Compiles a playbook to its assets and job.

    Args:
        made: partitions of the assets that other playbooks of the code location make.
        specs: what Dagster is to show of assets, by step; default: what the playbook says.
        writers: the assets whose steps write a table; default: those of the playbook itself.

    Raises:
        DagsterInvalidDefinitionError: never for a playbook that passed the checks of the loader.
    """
    graph = StepGraph(playbook)
    compiled = build_graph(playbook, graph, made, writers or PlaybookWriters([playbook]))
    name = dagster_name(playbook.name)
    tags = {PLAYBOOK_TAG: playbook.metadata.path} | {tag_key(tag): "" for tag in playbook.metadata.tags}
    tags |= run_tags(playbook)
    description = playbook.metadata.description or None
    if not compiled.results:
        job = compiled.definition.to_job(
            name,
            description=description,
            tags=tags,
            executor_def=noetl_executor,
            partitions_def=partitions_of(playbook),
        )
        return PlaybookJob(name, playbook, None, job, compiled)
    assets = _assets(playbook, graph, compiled, specs)
    asset_job = define_asset_job(
        name,
        selection=AssetSelection.assets(*assets.keys),
        description=description,
        tags=tags,
        executor_def=noetl_executor,
    )
    return PlaybookJob(name, playbook, assets, asset_job, compiled)


def _assets(
    playbook: Playbook, graph: StepGraph, compiled: PlaybookGraph, given: Mapping[str, AssetSpec]
) -> AssetsDefinition:
    outputs = {output: playbook.step(step) for step, output in compiled.results.items()}
    specs = {output: given.get(step.name) or asset_spec(playbook, step) for output, step in outputs.items()}
    asking = _asking(compiled)
    condition = condition_of(playbook.dagster.automation)
    conditions = {
        output: spec.automation_condition or (condition if output in asking else None)
        for output, spec in specs.items()
    }
    assets = AssetsDefinition.from_graph(
        compiled.definition,
        keys_by_input_name={reading.input: reading.key for reading in compiled.readings},
        keys_by_output_name={output: asset_key(playbook, step.name) for output, step in outputs.items()},
        internal_asset_deps=asset_deps(playbook, graph, compiled),
        partitions_def=partitions_of(playbook),
        partition_mappings={one.input: one.mapping for one in compiled.readings if one.mapping is not None},
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
            output: condition for output, condition in conditions.items() if condition is not None
        },
        check_specs=[spec for step in outputs.values() for spec in check_specs(playbook, step)],
    )
    fresh = {
        asset_key(playbook, outputs[output].name): spec.freshness_policy for output, spec in specs.items()
    }
    if not any(fresh.values()):
        return assets
    return assets.map_asset_specs(lambda spec: spec.replace_attributes(freshness_policy=fresh[spec.key]))


def _asking(compiled: PlaybookGraph) -> list[str]:
    """Outputs whose assets ask for a run, which makes all of them: those that read others, else the first."""
    readers = {step for reading in compiled.readings for step in reading.steps}
    return [output for step, output in compiled.results.items() if step in readers] or [
        next(iter(compiled.results.values()))
    ]


__all__ = ["JobDefinition", "PlaybookJob", "compile_playbook"]
