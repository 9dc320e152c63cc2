"""The control plane of one process, put together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.fanout.expand import Fanouts
from noetl_dagster.engine.helpers import HelperProcesses
from noetl_dagster.engine.interruptions import InterruptionWatch
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.loops.frames import release_expired
from noetl_dagster.engine.pool.dispatch import Dispatcher
from noetl_dagster.engine.pool.reaper import Reaper
from noetl_dagster.engine.recovery.abandoned import Recovery
from noetl_dagster.engine.recovery.maintenance import Maintenance
from noetl_dagster.engine.runtime import Runtime, connect
from noetl_dagster.engine.steps.entry import VisitDrivers
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.engine.walker import Children, Walker
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.projection import BackgroundProjection, Projection
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import NO_RUN, RunServices, ToolCall, ToolResult
from noetl_dagster.worker.execution import Execution

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")


class Engine:
    """Steps, fan-outs and lifecycle over one runtime."""

    def __init__(
        self, settings: Settings, pool: asyncpg.Pool, node: int, spark: Callable[[], SparkSession] | None = None
    ) -> None:
        assert settings.db_url is not None
        self.liveness = Liveness(settings.db_url, pool)
        self.dispatcher = Dispatcher(lambda: self.runtime, self.liveness)
        self.helpers = HelperProcesses(settings)
        self.runtime = runtime = Runtime(
            settings,
            pool,
            node,
            spark=spark,
            dispatcher=self.dispatcher,
            helpers=self.helpers,
            run_playbook=self._run_child,
        )
        self.lifecycle = Lifecycle(runtime, self.liveness)
        self.steps = Steps(runtime, VisitDrivers(runtime, self.liveness))
        self.fanouts = Fanouts(runtime, self.steps)
        self.walker = Walker(runtime, self.steps, self.fanouts, self.lifecycle)
        self.watch = InterruptionWatch(pool, self.liveness)
        self.projecting = BackgroundProjection(Projection(pool))
        self._children = Children(runtime, self.lifecycle, self.walker, self.watch)

    @classmethod
    async def open(cls, settings: Settings, *, spark: Callable[[], SparkSession] | None = None) -> Engine:
        """Connects to the services that ``settings`` names; see :func:`noetl_dagster.engine.runtime.connect`."""
        return await connect(settings, lambda pool, node: cls(settings, pool, node, spark))

    async def _run_child(self, call: ToolCall) -> ToolResult:
        return await self._children.run(call)

    async def close(self) -> None:
        """Ends helper processes and background work, and closes all connections."""
        await self.helpers.close()
        await self.dispatcher.close()
        await self.watch.close()
        await self.liveness.close()
        await self.runtime.buffer.flush()
        await self.projecting.close()
        await self.runtime.close()

    async def run(self, playbook: Playbook, workload: dict[str, Any] | None = None) -> ExecutionState:
        """Runs a playbook in this process, without Dagster, and returns its final state."""
        execution = await self.lifecycle.create(playbook, workload)
        return await self.drive(execution)

    async def resume(self, execution_id: int) -> ExecutionState:
        """Resumes an execution that stopped or failed, in this process, without Dagster."""
        execution = await self.lifecycle.resume(execution_id)
        return await self.drive(execution)

    async def guard(self, execution: Execution, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work that drives an execution, and projects its events; see :meth:`InterruptionWatch.guard`."""
        with self.projecting.running():
            return await self.watch.guard(execution.id, work, epoch=execution.state.epoch)

    def reaper(self) -> Reaper:
        """Returns the reaper, which finds claims of silent workers."""
        runtime = self.runtime
        return Reaper(runtime.pool, runtime.handler, runtime.commands, partial(release_expired, runtime))

    def recovery(self) -> Recovery:
        """Returns the recovery of executions whose process is gone."""
        return Recovery(self.runtime, self.lifecycle, self.liveness)

    def maintenance(self) -> Maintenance:
        """Returns the maintenance of partitions and results, configured by the settings."""
        settings = self.runtime.settings
        retention = timedelta(days=settings.retention_days) if settings.retention_days is not None else None
        return Maintenance(self.runtime.pool, self.runtime.results, retention, width=settings.partition_width)

    async def drive(
        self, execution: Execution, *, release: bool = True, services: RunServices = NO_RUN
    ) -> ExecutionState:
        """Takes an execution to its end, in this process, without Dagster, and returns its final state.

        Args:
            release: other processes may then work on it; else the caller releases it.
            services: what the steps of the execution use of Dagster.
        """
        execution.services = services
        await self.liveness.hold(execution.id)
        try:
            await self.guard(execution, self.walker.run(execution))
        except ExecutionCancelledError:
            return (await self.runtime.load(execution.id)).state
        finally:
            if release:
                await self.liveness.release(execution.id)
        return execution.state
