"""Drives a whole execution in one process, without Dagster: for child playbooks, tests and the command line."""

from __future__ import annotations

import asyncio

from noetl_dagster.engine.executions.lifecycle import Lifecycle
from noetl_dagster.engine.executions.spark_ahead import prepare_spark
from noetl_dagster.engine.fanout.expand import Fanouts
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.regions import incoming, run_region, run_streams
from noetl_dagster.engine.steps.step import Steps
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.graph import Region
from noetl_dagster.worker.execution import Execution


class Walker:
    """Walks the graph of regions. Branches run at the same time; a join waits for all its possible sources."""

    def __init__(self, runtime: Runtime, steps: Steps, fanouts: Fanouts, lifecycle: Lifecycle) -> None:
        self._runtime = runtime
        self._steps = steps
        self._fanouts = fanouts
        self._lifecycle = lifecycle

    async def run(self, execution: Execution) -> ExecutionStatus:
        """Runs every step that arcs reach and ends the execution."""
        graph = execution.program.graph
        settled = {region.name: asyncio.Event() for region in graph.regions}
        blocked: set[str] = set()
        sources: dict[str, set[str]] = {region.name: set() for region in graph.regions}
        for region in graph.regions:
            for target in region.targets:
                sources[graph.region_of(target).name].add(region.name)

        async def drive(region: Region) -> None:
            for source in sources[region.name]:
                await settled[source].wait()
            runs = execution.state.is_running and incoming(execution, region)
            if runs and not blocked & sources[region.name]:
                failure = await self._run_region(execution, region)
                if failure:
                    blocked.add(region.name)
            elif blocked & sources[region.name]:
                blocked.add(region.name)
            settled[region.name].set()

        try:
            async with asyncio.TaskGroup() as group:
                for region in graph.regions:
                    group.create_task(drive(region))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return await self._lifecycle.finish_if_over(execution)

    async def _run_region(self, execution: Execution, region: Region) -> bool:
        """Runs a region; returns true if a failure in it was not handled."""
        prepare_spark(self._runtime, execution)
        if region.is_joint:
            walk = run_streams if region.is_stream else run_region
            _, failure = await walk(self._steps, execution, region)
            return failure is not None
        step = region.steps[0]
        if execution.playbook.step(step).is_fanout:
            return (await self._fanouts.run(execution, step)).unhandled
        return (await self._steps.run(execution, step)).unhandled
