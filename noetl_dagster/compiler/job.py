"""One playbook as a graph-backed multi-asset and a job of the same name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dagster import (
    AssetsDefinition,
    AssetSelection,
    JobDefinition,
    ScheduleDefinition,
    define_asset_job,
)

from noetl_dagster.compiler.assets.partitions import partitions_of
from noetl_dagster.compiler.assets.reading import Partitioned
from noetl_dagster.compiler.assets.schedules import schedules_of
from noetl_dagster.compiler.assets.specs import (
    check_specs,
    condition_of,
    freshness_of,
    group_of,
    metadata_of,
    owners_of,
    tags_of,
)
from noetl_dagster.compiler.executor import noetl_executor
from noetl_dagster.compiler.graph import PlaybookGraph, asset_deps, build_graph
from noetl_dagster.compiler.names import asset_key, dagster_name, tag_key
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


def compile_playbook(playbook: Playbook, made: Partitioned = MappingProxyType({})) -> PlaybookJob:
    """Compiles a playbook to its assets and job.

    Args:
        made: partitions of the assets that other playbooks of the code location make.

    Raises:
        DagsterInvalidDefinitionError: never for a playbook that passed the checks of the loader.
    """
    graph = StepGraph(playbook)
    compiled = build_graph(playbook, graph, made)
    name = dagster_name(playbook.name)
    tags = {PLAYBOOK_TAG: playbook.metadata.path} | {tag_key(tag): "" for tag in playbook.metadata.tags}
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
    assets = _assets(playbook, graph, compiled)
    asset_job = define_asset_job(
        name,
        selection=AssetSelection.assets(*assets.keys),
        description=description,
        tags=tags,
        executor_def=noetl_executor,
    )
    return PlaybookJob(name, playbook, assets, asset_job, compiled)


def _assets(playbook: Playbook, graph: StepGraph, compiled: PlaybookGraph) -> AssetsDefinition:
    outputs = {output: playbook.step(step) for step, output in compiled.results.items()}
    descriptions = {output: step.asset.description or step.description for output, step in outputs.items()}
    versions = {output: step.asset.code_version for output, step in outputs.items()}
    condition = condition_of(playbook.dagster.automation)
    assets = AssetsDefinition.from_graph(
        compiled.definition,
        keys_by_input_name={reading.input: reading.key for reading in compiled.readings},
        keys_by_output_name={output: asset_key(playbook, step.name) for output, step in outputs.items()},
        internal_asset_deps=asset_deps(playbook, graph, compiled),
        partitions_def=partitions_of(playbook),
        partition_mappings={one.input: one.mapping for one in compiled.readings if one.mapping is not None},
        group_names_by_output_name={output: group_of(playbook, step) for output, step in outputs.items()},
        descriptions_by_output_name={output: text for output, text in descriptions.items() if text},
        metadata_by_output_name={output: metadata_of(playbook, step) for output, step in outputs.items()},
        tags_by_output_name={output: tags_of(playbook, step) for output, step in outputs.items()},
        owners_by_output_name={output: list(owners_of(playbook, step)) for output, step in outputs.items()},
        code_versions_by_output_name={output: version for output, version in versions.items() if version},
        automation_conditions_by_output_name={
            output: condition for output in _asking(compiled) if condition is not None
        },
        check_specs=[spec for step in outputs.values() for spec in check_specs(playbook, step)],
    )
    freshness = freshness_of(playbook.dagster.freshness)
    if freshness is None:
        return assets
    return assets.map_asset_specs(lambda spec: spec.replace_attributes(freshness_policy=freshness))


def _asking(compiled: PlaybookGraph) -> list[str]:
    """Outputs whose assets ask for a run, which makes all of them: those that read others, else the first."""
    readers = {step for reading in compiled.readings for step in reading.steps}
    return [output for step, output in compiled.results.items() if step in readers] or [
        next(iter(compiled.results.values()))
    ]


__all__ = ["JobDefinition", "PlaybookJob", "compile_playbook"]
