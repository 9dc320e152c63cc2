"""One playbook as a graph-backed multi-asset and a job of the same name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster import AssetsDefinition, AssetSelection, JobDefinition, define_asset_job

from noetl_dagster.compiler.executor import noetl_executor
from noetl_dagster.compiler.graph import PlaybookGraph, asset_deps, build_graph
from noetl_dagster.compiler.names import asset_key, dagster_name, tag_key
from noetl_dagster.dagster_internals import UnresolvedAssetJobDefinition
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Playbook

PLAYBOOK_TAG = "noetl/playbook"


@dataclass(frozen=True, slots=True)
class PlaybookJob:
    """What a playbook becomes in Dagster."""

    name: str
    playbook: Playbook
    assets: AssetsDefinition
    job: UnresolvedAssetJobDefinition
    graph: PlaybookGraph

    def run_config(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run config that overrides keys of the workload."""
        return {"ops": {self.graph.definition.name: {"config": workload}}} if workload else {}


def compile_playbook(playbook: Playbook) -> PlaybookJob:
    """Compiles a playbook to its assets and job.

    Raises:
        DagsterInvalidDefinitionError: never for a playbook that passed the checks of the loader.
    """
    graph = StepGraph(playbook)
    compiled = build_graph(playbook, graph)
    name = dagster_name(playbook.name)
    outputs = compiled.results
    assets = AssetsDefinition.from_graph(
        compiled.definition,
        keys_by_output_name={output: asset_key(playbook, step) for step, output in outputs.items()},
        internal_asset_deps=asset_deps(playbook, graph, compiled),
        group_name=name,
        descriptions_by_output_name={
            output: playbook.step(step).description
            for step, output in outputs.items()
            if playbook.step(step).description
        },
        tags_by_output_name={output: _kinds(playbook, step) for step, output in outputs.items()},
    )
    job = define_asset_job(
        name,
        selection=AssetSelection.assets(*assets.keys),
        description=playbook.metadata.description or None,
        tags={PLAYBOOK_TAG: playbook.metadata.path} | {tag_key(tag): "" for tag in playbook.metadata.tags},
        executor_def=noetl_executor,
    )
    return PlaybookJob(name, playbook, assets, job, compiled)


def _kinds(playbook: Playbook, step: str) -> dict[str, str]:
    return {f"dagster/kind/{kind}": "" for kind in {task.kind for task in playbook.step(step).tasks}}


__all__ = ["JobDefinition", "PlaybookJob", "compile_playbook"]
