"""Runs a playbook's job in this process, recorded in Dagster like any other run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dagster import DagsterEvent, DagsterInstance, Definitions, JobDefinition

# private: a job made from a playbook, not from a module
from dagster._core.definitions.job_base import InMemoryJob

# private: executes a run with an id and tags; JobDefinition.execute_in_process ignores the executor of the job
from dagster._core.execution.api import execute_run

# private: names the job of a run, so that the UI can launch it again
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

# private: names the job of a run, so that the UI can launch it again
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from noetl_dagster.code_location.playbooks import definitions_of_jobs
from noetl_dagster.code_location.python_assets import checks_in_python
from noetl_dagster.compiler.automation import set_limits
from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.compiler.lineage.tables import FolderWriters
from noetl_dagster.compiler.names import LOCATION
from noetl_dagster.compiler.partitions import partition_tags, stored_partition
from noetl_dagster.compiler.plan import PlaybookPlan
from noetl_dagster.compiler.runs import PAGE_TAG, RESUME_TAG, execution_tags, latest_run, report_lost_run
from noetl_dagster.engine.executions.addresses import execution_url
from noetl_dagster.engine.executions.lifecycle import admitted_workload
from noetl_dagster.errors import ExecutionNotFoundError, NoetlError
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.workload import check_types
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings

_OWN_ERRORS = f"{NoetlError.__module__}."


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run of one playbook's job in this process."""

    run_id: str
    success: bool
    error: str | None = None


class PreparedJob(NamedTuple):
    """A playbook's job, for any number of runs in this process."""

    plan: PlaybookPlan
    job: JobDefinition


def prepare(
    playbook: Playbook, noetl: EngineProvider, resources: Mapping[str, Any] = MappingProxyType({})
) -> PreparedJob:
    """Compiles a playbook to its job, with the checks of its assets that ``*_assets.py`` next to it declare.

    Args:
        resources: instead of those that would be made.
    """
    folder = noetl.settings.playbooks_path
    compiled = compile_playbook(playbook, writers=FolderWriters(folder, playbook))
    checks = []
    if compiled.plan.keys and _is_below(playbook.file, folder):
        checks = checks_in_python(folder, compiled.plan.keys)
    definitions = definitions_of_jobs([compiled], noetl, resources=resources, spark=bool(checks))
    if checks:
        definitions = Definitions.merge(definitions, Definitions(asset_checks=checks))
    return PreparedJob(compiled.plan, definitions.resolve_job_def(compiled.plan.name))


def launch(
    playbook: Playbook | PreparedJob,
    noetl: EngineProvider,
    instance: DagsterInstance,
    *,
    execution_id: int,
    workload: dict[str, Any] | None = None,
    partition_key: str | None = None,
    resumed: bool = False,
    quiet: bool = True,
    tags: dict[str, str] | None = None,
    run_id: str | None = None,
) -> FinishedRun:
    """Runs the job of a playbook to its end.

    Args:
        playbook: or what :func:`prepare` made of it.
        workload: keys that override the playbook's workload.
        partition_key: of an execution that does not exist yet; default: the partition that the workload selects.
        resumed: the execution had a run before, which is shown as the parent. If its process is gone, it has failed.
        run_id: of the new run; default: any.
        quiet: keep Dagster's own log lines off the console; they are in the run's log anyway.

    Raises:
        WorkloadError: a value of ``workload`` does not have the type of the playbook's default, names no partition of
            a playbook that has them, or cannot be stored.
    """
    workload = admitted_workload(workload or {})
    plan, job = prepare(playbook, noetl) if isinstance(playbook, Playbook) else playbook
    check_types(plan.playbook.workload, workload)
    before = latest_run(instance, execution_id, plan.playbook.name) if resumed else None
    if before is not None:
        report_lost_run(instance, before)
    run_id = run_id or str(uuid.uuid4())
    run_config: dict[str, Any] = plan.run_config(workload)
    partition = None
    if plan.partitions.dimensions or partition_key is not None:
        try:
            partition = stored_partition(noetl.run(noetl.engine().runtime.load(execution_id)).state.partition)
        except ExecutionNotFoundError:
            partition = plan.partitions.choose(workload, partition_key)
    if partition is not None:
        plan.partitions.register(partition, instance)
    set_limits(instance, plan.playbook.dagster.pools)
    if quiet:
        run_config["loggers"] = {"console": {"config": {"log_level": "CRITICAL"}}}
    tags = {
        **(tags or {}),
        **execution_tags(execution_id, run_id),
        PAGE_TAG: execution_url(noetl.settings, execution_id),
        **partition_tags(partition),
        **({RESUME_TAG: run_id} if resumed else {}),
    }
    run = instance.create_run_for_job(
        job_def=job,
        run_id=run_id,
        run_config=run_config,
        tags=tags,
        parent_run_id=before.run_id if before is not None else None,
        root_run_id=(before.root_run_id or before.run_id) if before is not None else None,
        remote_job_origin=job_origin(plan, noetl.settings),
    )
    result = execute_run(InMemoryJob(job), run, instance)
    return FinishedRun(run.run_id, result.success, _reason([event for event in result.all_events if event.is_failure]))


def _reason(failures: Sequence[DagsterEvent]) -> str | None:
    """Returns the innermost error of the first failure, or the first of this package, whose message has the remedy."""
    for event in failures:
        error = getattr(event.event_specific_data, "error", None)
        while error is not None and error.cause is not None and not error.message.startswith(_OWN_ERRORS):
            error = error.cause
        if error is not None:
            return str(error.message).strip().removeprefix(_OWN_ERRORS)
    return failures[0].message if failures else None


def job_origin(plan: PlaybookPlan, settings: Settings) -> RemoteJobOrigin | None:
    """Returns the address at which the UI finds the job of a run, so that the run can be launched again there.

    None for a playbook outside of the folder of playbooks, which is no job of the code location.
    """
    if not _is_below(plan.playbook.file, settings.playbooks_path):
        return None
    location = ManagedGrpcPythonEnvCodeLocationOrigin(
        LoadableTargetOrigin(module_name=LOCATION, working_directory=str(Path.cwd())), LOCATION
    )
    return RemoteRepositoryOrigin(location, "__repository__").get_job_origin(plan.name)


def _is_below(file: str, folder: Path) -> bool:
    return Path(file).resolve().is_relative_to(folder.resolve())
