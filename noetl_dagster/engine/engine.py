"""The control plane of one process, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noetl_dagster.engine.child import Children
from noetl_dagster.engine.fanout import Fanouts
from noetl_dagster.engine.lifecycle import Lifecycle
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.step import Steps
from noetl_dagster.engine.turns import Turns
from noetl_dagster.engine.walker import Walker
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(slots=True)
class Engine:
    """Steps, fan-outs and lifecycle over one runtime."""

    runtime: Runtime
    lifecycle: Lifecycle
    steps: Steps
    fanouts: Fanouts
    walker: Walker
    liveness: Liveness

    @classmethod
    async def open(
        cls, settings: Settings, *, spark: Callable[[], SparkSession] | None = None
    ) -> Engine:
        """Opens a runtime and the control plane on it; see :meth:`Runtime.open`."""
        runtime = await Runtime.open(settings, spark=spark)
        assert settings.db_url is not None
        liveness = Liveness(settings.db_url, runtime.pool)
        lifecycle, steps = Lifecycle(runtime), Steps(runtime, Turns(runtime, liveness))
        fanouts = Fanouts(runtime, steps)
        walker = Walker(steps, fanouts, lifecycle)
        runtime.box.run_playbook = Children(runtime, lifecycle, walker).run
        return cls(runtime, lifecycle, steps, fanouts, walker, liveness)

    async def close(self) -> None:
        await self.liveness.close()
        await self.runtime.close()

    async def run(self, playbook: Playbook, workload: dict[str, Any] | None = None) -> ExecutionState:
        """Runs a playbook in this process, without Dagster, and returns its final state."""
        execution = await self.lifecycle.create(playbook, workload)
        await self.liveness.hold(execution.id)
        await self.walker.run(execution)
        return execution.state

    async def resume(self, execution_id: int) -> ExecutionState:
        """Goes on with an execution that stopped or failed, in this process, without Dagster."""
        execution = await self.lifecycle.resume(execution_id)
        await self.liveness.hold(execution.id)
        await self.walker.run(execution)
        return execution.state
