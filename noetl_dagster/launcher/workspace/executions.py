"""The API's launcher in a cluster: hands executions to Dagster's instance, which makes a run of each."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagster import DagsterInstance, DagsterRunStatus

from noetl_dagster.compiler.assets.automation import set_limits
from noetl_dagster.compiler.assets.partitions import partition_tags, register
from noetl_dagster.compiler.attach import execution_tags
from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.compiler.runs import latest_run
from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import LaunchError, NoetlError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.launcher.tags import PRIORITY_TAG
from noetl_dagster.launcher.workspace.jobs import Workspace
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""A run that drives a cancelled execution hears of it and ends by itself; one that has not so long after is ended."""

LOOK_SECONDS = 0.5

_WAITING = frozenset({DagsterRunStatus.NOT_STARTED, DagsterRunStatus.QUEUED, DagsterRunStatus.STARTING})


class WorkspaceLauncher:
    """Has the instance's run coordinator and launcher start a run for each execution that is in the log.

    Until the run is handed over this process answers for the execution; afterwards Dagster's record of the run does.
    Where this process dies between, the recovery sensor finds an execution without a process.

    Args:
        path: the workspace file.
    """

    def __init__(self, engine: Engine, instance: DagsterInstance, path: Path) -> None:
        self._engine = engine
        self._instance = instance
        self._workspace = Workspace(instance, path)
        self._ending: set[asyncio.Task[None]] = set()

    async def check(self, playbook: Playbook) -> None:
        await asyncio.to_thread(self._workspace.job_of, playbook)

    async def launch(
        self, playbook: Playbook, execution_id: int, workload: dict[str, Any], priority: int = 0
    ) -> None:
        try:
            state = (await self._engine.runtime.load(execution_id)).state
            partition = None if state.partition is None else Partition.model_validate(state.partition)
            await self._engine.liveness.hold(execution_id)
            await asyncio.to_thread(self._submit, playbook, execution_id, workload, partition, priority)
        except NoetlError:
            raise
        except Exception as error:
            raise LaunchError(f"{type(error).__name__}: {error}") from error
        finally:
            with suppress(*DATABASE_AWAY):  # which lets go of it too; what was handed over is
                await self._engine.liveness.release(execution_id)

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Ends the run of an execution that was cancelled, whatever it waits for."""
        task = asyncio.create_task(self._end_run(playbook, execution_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def connect(self) -> None:
        """Loads the workspace before the first execution needs it; where it does not load, that one says why."""
        try:
            await asyncio.to_thread(self._workspace.connect)
        except LaunchError as error:
            logger.warning("%s", error)

    async def close(self) -> None:
        await cancel_and_wait(*self._ending)
        await asyncio.to_thread(self._workspace.close)

    def _submit(
        self,
        playbook: Playbook,
        execution_id: int,
        workload: dict[str, Any],
        partition: Partition | None,
        priority: int,
    ) -> None:
        job = self._workspace.job_of(playbook)
        run_id = str(uuid.uuid4())
        if partition is not None:
            register(partition, playbook, self._instance)
        set_limits(self._instance, playbook.dagster.pools)
        tags = execution_tags(execution_id, run_id) | partition_tags(partition)
        if priority:
            tags[PRIORITY_TAG] = str(priority)
        run_config = compile_playbook(playbook).run_config(workload) if workload else {}
        self._workspace.submit(job, run_id, run_config, tags)

    async def _end_run(self, playbook: str, execution_id: int) -> None:
        try:
            run = await asyncio.to_thread(latest_run, self._instance, execution_id, playbook)
            deadline = asyncio.get_running_loop().time() + END_SECONDS
            while run is not None and not run.is_finished:
                if run.status in _WAITING or asyncio.get_running_loop().time() > deadline:
                    await asyncio.to_thread(self._instance.run_coordinator.cancel_run, run.run_id)
                    return
                await asyncio.sleep(LOOK_SECONDS)
                run = await asyncio.to_thread(self._instance.get_run_by_id, run.run_id)
        except Exception:
            logger.exception("the run of cancelled execution %d was not ended", execution_id)
