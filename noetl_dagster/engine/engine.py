"""The control plane of one process, put together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.fanout.expand import Fanouts
from noetl_dagster.engine.helpers import HelperProcesses
from noetl_dagster.engine.interruptions import InterruptionWatch
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.loops.frames import release_expired
from noetl_dagster.engine.pool.dispatch import Dispatcher
from noetl_dagster.engine.recovery.abandoned import Recovery
from noetl_dagster.engine.recovery.maintenance import Maintenance
from noetl_dagster.engine.recovery.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.engine.steps.visits import VisitDrivers
from noetl_dagster.engine.walker import Children, Walker
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.projection import BackgroundProjection, Projection
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """Steps, fan-outs and lifecycle over one runtime."""

    runtime: Runtime
    lifecycle: Lifecycle
    steps: Steps
    fanouts: Fanouts
    walker: Walker
    liveness: Liveness
    watch: InterruptionWatch
    dispatcher: Dispatcher
    helpers: HelperProcesses
    projecting: BackgroundProjection

    @classmethod
    async def open(cls, settings: Settings, *, spark: Callable[[], SparkSession] | None = None) -> Engine:
        """Opens a runtime and the control plane on it; see :meth:`Runtime.open`."""
        runtime = await Runtime.open(settings, spark=spark)
        assert settings.db_url is not None
        liveness = Liveness(settings.db_url, runtime.pool)
        lifecycle, steps = Lifecycle(runtime), Steps(runtime, VisitDrivers(runtime, liveness))
        fanouts = Fanouts(runtime, steps)
        walker = Walker(runtime, steps, fanouts, lifecycle)
        watch = InterruptionWatch(runtime.pool, liveness)
        runtime.box.run_playbook = Children(runtime, lifecycle, walker, watch).run
        projecting = BackgroundProjection(Projection(runtime.pool))
        dispatcher = Dispatcher(runtime)
        runtime.dispatcher = dispatcher
        runtime.helpers = helpers = HelperProcesses(runtime.settings)
        return cls(
            runtime, lifecycle, steps, fanouts, walker, liveness, watch, dispatcher, helpers, projecting
        )

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
        return await self._drive(execution)

    async def resume(self, execution_id: int) -> ExecutionState:
        """Resumes an execution that stopped or failed, in this process, without Dagster."""
        execution = await self.lifecycle.resume(execution_id)
        return await self._drive(execution)

    async def guard(self, execution: Execution, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work that drives an execution. Cancellations stop the work; its events are projected meanwhile.

        Raises:
            ExecutionCancelledError: the execution was cancelled, and the work with it.
        """
        with self.projecting.running():
            return await self.watch.guard(execution.id, work, epoch=execution.state.epoch)

    def reaper(self) -> Reaper:
        """Returns the reaper, which finds claims of silent workers."""
        runtime = self.runtime
        handler = EventHandler(runtime.log, runtime.settings.command_heartbeat_timeout_seconds)
        return Reaper(runtime.pool, handler, runtime.ids, release=partial(release_expired, runtime))

    def recovery(self) -> Recovery:
        """Returns the recovery of executions whose process is gone."""
        return Recovery(self.runtime, self.lifecycle, self.liveness)

    def maintenance(self) -> Maintenance:
        """Returns the maintenance of partitions and results, configured by the settings."""
        days = self.runtime.settings.retention_days
        retention = timedelta(days=days) if days is not None else None
        return Maintenance(self.runtime.pool, self.runtime.results, retention)

    async def _drive(self, execution: Execution) -> ExecutionState:
        await self.liveness.hold(execution.id)
        try:
            await self.guard(execution, self.walker.run(execution))
        except ExecutionCancelledError:
            return (await self.runtime.load(execution.id)).state
        return execution.state
