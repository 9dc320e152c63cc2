"""The HTTP API with all that it needs: the plane, a launcher of runs, and upkeep in the background."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.abandoned import Abandoned, RecoveryWatch
from noetl_dagster.errors import NoetlError
from noetl_dagster.launcher.address import Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.catalog import Catalog, names_version
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.service.app import create_app
from noetl_dagster.service.plane import Launcher, Plane
from noetl_dagster.settings import METRICS_FOLDER, RunLauncher, Settings

logger = logging.getLogger(__name__)


def create_api(settings: Settings, ready: Callable[[], None]) -> FastAPI:
    """Returns the HTTP API, which opens what it needs when it starts; it calls ``ready`` when that is done."""
    environment = embedded.environment(settings)
    if "DAGSTER_HOME" not in os.environ:
        environment["DAGSTER_HOME"] = str(embedded.dagster_home(settings))
    open_launcher = _through_dagster if settings.run_launcher is RunLauncher.DAGSTER else _warm

    @asynccontextmanager
    async def plane() -> AsyncIterator[Plane]:
        launcher = partial(open_launcher, settings=settings, environment=environment)
        opened = await Plane.open(settings, launcher, choose_partition)
        warming = asyncio.create_task(opened.launcher.connect())  # ready for the first execution
        lease = settings.command_heartbeat_timeout_seconds
        watching = [asyncio.create_task(opened.engine.reaper().run(lease))]
        if settings.recovery_grace_seconds is not None and isinstance(opened.launcher, WarmLauncher):
            watch = recovery_watch(opened.engine, opened.launcher, opened.catalog, settings.recovery_grace_seconds)
            watching.append(asyncio.create_task(watch.run()))
        ready()
        gc.freeze()  # loaded modules stay: no garbage collection visits them while requests wait
        try:
            with opened.engine.projecting.running():
                yield opened
        finally:
            await cancel_and_wait(*watching)
            await warming
            await opened.close()

    return create_app(settings, plane)


def choose_partition(playbook: Playbook, workload: Mapping[str, Any], key: str | None) -> Partition | None:
    """Returns the partition of an execution that is to start; see :class:`PlaybookPartitions` of the compiler."""
    from noetl_dagster.compiler.partitions import PlaybookPartitions  # Dagster takes seconds to import

    return PlaybookPartitions(playbook).choose(workload, key)


def _warm(engine: Engine, settings: Settings, environment: dict[str, str]) -> Launcher:
    # runs count nothing
    inherited = {name: text for name, text in os.environ.items() if name != METRICS_FOLDER}
    folder = embedded.run_server_folder(settings)
    address = Address.of(folder, {**inherited, **environment}, settings.driven_at_once)
    return WarmLauncher(engine, address)


def recovery_watch(engine: Engine, launcher: WarmLauncher, catalog: Catalog, grace: float) -> RecoveryWatch:
    """Returns the watch that resumes executions of playbooks that are in this service's folder, or registered."""

    async def find(one: Abandoned) -> Playbook | None:
        try:
            playbook = (await engine.runtime.load(one.execution_id)).playbook
        except NoetlError as error:
            logger.warning("execution %d is left to the recovery sensor: %s", one.execution_id, error)
            return None
        return playbook if names_version(playbook.file) or catalog.has(playbook) else None

    return RecoveryWatch(
        engine.runtime, engine.liveness, engine.recovery(), grace=grace, find=find, resume=launcher.recover
    )


def _through_dagster(engine: Engine, settings: Settings, environment: dict[str, str]) -> Launcher:
    """Sets the environment, from which Dagster reads its instance and code locations."""
    from dagster import DagsterInstance  # takes seconds to import

    from noetl_dagster.launcher.workspace import WorkspaceLauncher

    for name, value in environment.items():
        os.environ.setdefault(name, value)
    return WorkspaceLauncher(engine, DagsterInstance.get(), settings.workspace)
