"""The API's launcher in a cluster: each execution becomes a run of Dagster's own instance.

The instance's coordinator queues the runs, and its run launcher makes their pods.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagster import DagsterInstance, DagsterRunStatus

# private: creates a run of a job in a workspace, as 'dagster job launch' does
from dagster._cli.job import _create_run

# private: the jobs of a workspace; else launchRun of the webserver's GraphQL API
from dagster._core.workspace.load import load_workspace_process_context_from_yaml_paths

from noetl_dagster.compiler.automation import set_limits
from noetl_dagster.compiler.partitions import partition_tags, stored_partition
from noetl_dagster.compiler.plan import PLAYBOOK_TAG, PlaybookPlan, plan_playbook
from noetl_dagster.compiler.runs import RESUME_TAG, execution_tags, latest_run
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.errors import LaunchError, NoetlError, NotDeployedError
from noetl_dagster.events.connection import DATABASE_ERRORS
from noetl_dagster.launcher.address import PRIORITY_TAG
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.redaction import SECRETS

REFRESH_SECONDS = 5.0
"""Seconds after which a code location that did not load, or lacks the job, is refreshed."""


logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Seconds after which the run of a cancelled execution is terminated, if it has not ended by itself."""

POLL_SECONDS = 0.5

_WAITING = frozenset({DagsterRunStatus.NOT_STARTED, DagsterRunStatus.QUEUED, DagsterRunStatus.STARTING})


WorkspaceJob = tuple[Any, Any]
"""A code location and one of its jobs, as Dagster describes them."""


class Workspace:
    """The code locations of a workspace file, ``workspace.yaml``; connected when they are first needed."""

    def __init__(self, instance: DagsterInstance, path: Path) -> None:
        self._instance = instance
        self._path = path
        self._process: Any = None
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._refreshed_at = 0.0

    def connect(self) -> Any:
        """Loads the code locations if they are not loaded, and returns Dagster's context of a request to them.

        Raises:
            LaunchError: the workspace cannot be loaded.
        """
        with self._lock:
            if self._process is None:
                if not self._path.is_file():
                    raise LaunchError(
                        f"there is no workspace file {self._path}; set NOETL_WORKSPACE to the one that Dagster is "
                        "started with"
                    )
                try:
                    self._process = load_workspace_process_context_from_yaml_paths(self._instance, [str(self._path)])
                except Exception as error:
                    raise LaunchError(f"the workspace {self._path} cannot be loaded: {error}") from error
            return self._process.create_request_context()

    def close(self) -> None:
        """Disconnects from the code locations."""
        with self._lock:
            if self._process is not None:
                self._process.__exit__(None, None, None)

    def job_of(self, plan: PlaybookPlan) -> WorkspaceJob:
        """Returns the job of a playbook.

        Raises:
            NotDeployedError: no code location has it.
            LaunchError: the workspace, or a code location that may have it, cannot be loaded just now.
        """
        job = self._find(plan)
        if job is None:
            self._refresh()
            job = self._find(plan)
        if job is None:
            raise self._missing(plan)
        return job

    def _refresh(self) -> None:
        """Refreshes the code locations one after another; known jobs can be found meanwhile."""
        with self._refreshing:
            if time.monotonic() - self._refreshed_at <= REFRESH_SECONDS:
                return
            for name in self.connect().code_location_names:
                self._process.refresh_code_location(name)
            self._refreshed_at = time.monotonic()

    def submit(
        self, workspace_job: WorkspaceJob, run_id: str, run_config: dict[str, Any], tags: dict[str, str]
    ) -> None:
        """Creates a run and gives it to the instance's run coordinator.

        Raises:
            Exception: the code location refuses the run, or the launcher cannot start it; the run has failed then.
        """
        location, job = workspace_job
        repository = location.get_repository(job.repository_handle.repository_name)
        _create_run(self._instance, location, repository, job, run_config, tags, op_selection=None, run_id=run_id)
        try:
            self._instance.submit_run(run_id, self.connect())
        except Exception as error:  # it may be queued nevertheless
            now = self._instance.get_run_by_id(run_id)
            if now is not None and not now.is_finished:
                why = SECRETS.redact(f"not handed over: {type(error).__name__}: {error}")
                self._instance.report_run_failed(now, why)
            raise

    def _find(self, plan: PlaybookPlan) -> WorkspaceJob | None:
        for entry in self.connect().get_code_location_entries().values():
            for repository in entry.code_location.get_repositories().values() if entry.code_location else ():
                if not repository.has_job(plan.name):
                    continue
                job = repository.get_full_job(plan.name)
                if job.tags.get(PLAYBOOK_TAG) == plan.playbook.metadata.path:
                    return entry.code_location, job
        return None

    def _missing(self, plan: PlaybookPlan) -> LaunchError | NotDeployedError:
        entries = self.connect().get_code_location_entries()
        broken = [f"{name}: {entry.load_error.message}" for name, entry in entries.items() if entry.load_error]
        if broken:
            return LaunchError(f"code locations of {self._path} do not load: {'; '.join(broken)}")
        return NotDeployedError(
            f"playbook {plan.playbook.metadata.path!r} is no job of the code locations of {self._path} "
            f"({', '.join(entries) or 'none'}), and runs are launched there (NOETL_RUN_LAUNCHER=dagster); put its file "
            "into their folder of playbooks and reload them, or call it from a playbook that is a job"
        )


class WorkspaceLauncher:
    """Lets the instance's run coordinator and launcher start a run for each execution that is in the log.

    This process holds the execution until the run is handed over. If the process dies before that, the recovery sensor
    finds an execution without a process.
    """

    def __init__(self, engine: Engine, instance: DagsterInstance, path: Path) -> None:
        self._engine = engine
        self._instance = instance
        self._workspace = Workspace(instance, path)
        self._ending: set[asyncio.Task[None]] = set()

    async def check(self, playbook: Playbook, runner: Runner = Runner.DAGSTER) -> None:
        """Checks that a code location has the playbook's job.

        Raises:
            NotDeployedError: none has it, or the execution is to have no run.
            LaunchError: the workspace cannot be loaded.
        """
        if runner is Runner.ENGINE:
            raise NotDeployedError(
                "runner 'engine' needs NOETL_RUN_LAUNCHER=warm: this API starts every execution as a Dagster run"
            )
        await asyncio.to_thread(lambda: self._workspace.job_of(plan_playbook(playbook)))

    async def launch(
        self,
        playbook: Playbook,
        execution_id: int,
        workload: dict[str, Any],
        priority: int = 0,
        runner: Runner = Runner.DAGSTER,
        *,
        resumed: bool = False,
    ) -> None:
        """Creates the run of an execution and hands it to the run coordinator.

        Raises:
            LaunchError: the run was not handed over.
        """
        try:
            state = (await self._engine.runtime.load(execution_id)).state
            partition = stored_partition(state.partition)
            await self._engine.liveness.hold(execution_id)
            await asyncio.to_thread(self._submit, playbook, execution_id, workload, partition, priority, resumed)
        except NoetlError:
            raise
        except Exception as error:
            raise LaunchError(f"{type(error).__name__}: {error}") from error
        finally:
            with suppress(*DATABASE_ERRORS):  # then the outage releases it; the run was handed over
                await self._engine.liveness.release(execution_id)

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Ends the run of an execution that was cancelled, even if it waits in a queue."""
        task = asyncio.create_task(self._end_run(playbook, execution_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def connect(self) -> None:
        """Loads the workspace before the first execution needs it; if it fails, that execution reports why."""
        try:
            await asyncio.to_thread(self._workspace.connect)
        except LaunchError as error:
            logger.warning("%s", error)

    def failure(self, execution_id: int) -> str | None:
        """Returns nothing: the run has its error in Dagster."""
        return None

    async def close(self) -> None:
        """Waits for cancellations and disconnects."""
        await cancel_and_wait(*self._ending)
        await asyncio.to_thread(self._workspace.close)

    def _submit(
        self,
        playbook: Playbook,
        execution_id: int,
        workload: dict[str, Any],
        partition: Partition | None,
        priority: int,
        resumed: bool,
    ) -> None:
        plan = plan_playbook(playbook)
        job = self._workspace.job_of(plan)
        run_id = str(uuid.uuid4())
        if partition is not None:
            plan.partitions.register(partition, self._instance)
        set_limits(self._instance, playbook.dagster.pools)
        tags = execution_tags(execution_id, run_id) | partition_tags(partition)
        if resumed:
            tags[RESUME_TAG] = run_id
        if priority:
            tags[PRIORITY_TAG] = str(priority)
        self._workspace.submit(job, run_id, plan.run_config(workload), tags)

    async def _end_run(self, playbook: str, execution_id: int) -> None:
        try:
            run = await asyncio.to_thread(latest_run, self._instance, execution_id, playbook)
            deadline = asyncio.get_running_loop().time() + END_SECONDS
            while run is not None and not run.is_finished:
                if run.status in _WAITING or asyncio.get_running_loop().time() > deadline:
                    await asyncio.to_thread(self._instance.run_coordinator.cancel_run, run.run_id)
                    return
                await asyncio.sleep(POLL_SECONDS)
                run = await asyncio.to_thread(self._instance.get_run_by_id, run.run_id)
        except Exception:
            logger.exception("the run of cancelled execution %d was not ended", execution_id)
