"""Runs a playbook's job in this process, recorded in Dagster like any other run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dagster import DagsterInstance, DagsterInvalidConfigError, DagsterRun, Definitions, JobDefinition

from noetl_dagster.code_location.playbooks import definitions_of_jobs
from noetl_dagster.code_location.python_assets import checks_beside
from noetl_dagster.compiler.automation import set_limits
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.lineage.tables import FolderWriters
from noetl_dagster.compiler.partitions import chosen_partition, partition_tags, register
from noetl_dagster.compiler.runs import RESUME_TAG, execution_tags
from noetl_dagster.dagster_internals import (
    InMemoryJob,
    LoadableTargetOrigin,
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
    execute_run,
)
from noetl_dagster.errors import ExecutionNotFoundError, WorkloadError
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings

LOCATION = "noetl_dagster.definitions"
"""Module and name of the code location in workspace.yaml."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of one playbook's job in this process."""

    run_id: str
    execution_id: int
    success: bool
    error: str | None = None


class Prepared(NamedTuple):
    """A playbook's job, for any number of runs in this process."""

    compiled: PlaybookJob
    job: JobDefinition

    @property
    def playbook(self) -> Playbook:
        return self.compiled.playbook


def prepare(
    playbook: Playbook, noetl: EngineProvider, resources: Mapping[str, Any] = MappingProxyType({})
) -> Prepared:
    """Compiles a playbook to its job, with the checks of its assets that stand in Python beside it.

    Args:
        resources: instead of those that would be made.
    """
    folder = noetl.settings.playbooks_path
    compiled = compile_playbook(playbook, writers=FolderWriters(folder, playbook))
    checks = []
    if compiled.assets is not None and _is_below(playbook.file, folder):
        checks = checks_beside(folder, compiled.assets.keys)
    definitions = definitions_of_jobs([compiled], noetl, resources=resources, spark=bool(checks))
    if checks:
        definitions = Definitions.merge(definitions, Definitions(asset_checks=checks))
    return Prepared(compiled, definitions.resolve_job_def(compiled.name))


def _is_below(file: str, folder: Path) -> bool:
    return Path(file).resolve().is_relative_to(folder.resolve())


def launch(
    playbook: Playbook,
    noetl: EngineProvider,
    instance: DagsterInstance,
    *,
    execution_id: int,
    workload: dict[str, Any] | None = None,
    resumes: DagsterRun | None = None,
    resumed: bool = False,
    quiet: bool = True,
    tags: dict[str, str] | None = None,
    run_id: str | None = None,
    prepared: Prepared | None = None,
) -> Launch:
    """Runs the job of a playbook to its end.

    Args:
        execution_id: a new id, or with ``resumed`` that of the execution to go on with.
        workload: keys that override the playbook's workload.
        resumes: the run that drove the execution before, shown as the parent.
        run_id: of the new run; default: any.
        prepared: what :func:`prepare` made of the playbook; default: made now.
        quiet: keep Dagster's own log lines off the console; they are in the run's log anyway.

    Raises:
        WorkloadError: a value of ``workload`` does not have the type of the playbook's default, or names no
            partition of a playbook that has them.
    """
    compiled, job = prepared or prepare(playbook, noetl)
    run_id = run_id or str(uuid.uuid4())
    run_config: dict[str, Any] = compiled.run_config(workload or {})
    partition = _partition(playbook, noetl, execution_id, workload or {})
    if partition is not None:
        register(partition, playbook, instance)
    set_limits(instance, playbook.dagster.pools)
    if quiet:
        run_config["loggers"] = {"console": {"config": {"log_level": "CRITICAL"}}}
    try:
        run = instance.create_run_for_job(
            job_def=job,
            run_id=run_id,
            run_config=run_config,
            tags={
                **(tags or {}),
                **execution_tags(execution_id, run_id),
                **partition_tags(partition),
                **({RESUME_TAG: run_id} if resumed else {}),
            },
            parent_run_id=resumes.run_id if resumes is not None else None,
            root_run_id=(resumes.root_run_id or resumes.run_id) if resumes is not None else None,
            remote_job_origin=_origin(playbook, compiled.name, noetl.settings),
        )
    except DagsterInvalidConfigError as error:
        reasons = "; ".join(one.message for one in error.errors)
        raise WorkloadError(f"workload of {playbook.name}: {reasons}") from error
    result = execute_run(InMemoryJob(job), run, instance, raise_on_error=False)
    failures = (event.message for event in result.all_events if event.is_run_failure)
    return Launch(run_id, execution_id, result.success, next(failures, None))


def _partition(
    playbook: Playbook, noetl: EngineProvider, execution_id: int, workload: dict[str, Any]
) -> Partition | None:
    """The partition that an execution belongs to, or that the workload of a new one names."""
    if not playbook.dagster.partitions:
        return None
    try:
        known = noetl.run(noetl.engine().runtime.load(execution_id)).state.partition
    except ExecutionNotFoundError:
        return chosen_partition(playbook, workload)
    return None if known is None else Partition.model_validate(known)


def _origin(playbook: Playbook, job_name: str, settings: Settings) -> RemoteJobOrigin | None:
    """Where the UI finds the job of a run, so that the run can be launched again from there."""
    if not _is_below(playbook.file, settings.playbooks_path):
        return None
    location = ManagedGrpcPythonEnvCodeLocationOrigin(
        LoadableTargetOrigin(module_name=LOCATION, working_directory=str(Path.cwd())), LOCATION
    )
    return RemoteRepositoryOrigin(location, "__repository__").get_job_origin(job_name)
