"""The driver of executions without a Dagster run: it drives many side by side, and reports them to Dagster in batches.

Like the driver of runs, it is a process that is forked from the run server, with everything imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import ExitStack

import psutil
from dagster import DagsterInstance

from noetl_dagster.compiler.executors.storages import keep_connections
from noetl_dagster.compiler.external_assets import services_of
from noetl_dagster.compiler.reporting import DagsterReporter
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.abandoned import RECOVERY
from noetl_dagster.errors import ExecutionStateError
from noetl_dagster.launcher.address import Address, RunLock, driver_of
from noetl_dagster.process.collector import release_free_memory
from noetl_dagster.process.environment import withhold_settings
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.process.forking import AsyncChannel, Channel, Message
from noetl_dagster.process.logs import LogContext
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.tools.base import NO_RUN
from noetl_dagster.worker.execution import Execution

logger = logging.getLogger(__name__)

MOST_EXECUTIONS = 100_000
"""Executions after which this process is replaced, since their leftovers add up."""

MOST_GROWTH_BYTES = 1024**3
"""This process is replaced if it has grown by more."""

RELEASE_SECONDS = 60.0
"""Seconds between two returns of free memory, each of which takes up to 0.1 s."""

REPORTED_AT_ONCE = 200
LINGER_SECONDS = 0.2
"""Time for more executions to end: reports of a few at a time cost more."""

REPORT_TRIES = 5
RETRY_SECONDS = 1.0


class EngineDriver:
    """Drives what the run server sends until that is gone or ends it; what it drives then, it drives to the end."""

    def __init__(self, channel: Channel, address: Address) -> None:
        self._channel = channel
        self._folder = address.folder / "runs"
        self._noetl = EngineProvider()
        self._services = NO_RUN
        self._memory = psutil.Process().memory_info().rss
        self._released_at = 0.0
        self._count = 0

    def main(self) -> None:
        """Serves until the end of the process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        engine = self._noetl.engine()
        with ExitStack() as stack:
            reports = None
            if "DAGSTER_HOME" in os.environ:
                instance = stack.enter_context(DagsterInstance.get())
                keep_connections(instance)
                reports = Reports(DagsterReporter(engine, instance))
                self._services = services_of(engine.runtime, instance)
            withhold_settings()
            try:
                run_sync(self._serve(engine, reports))
            finally:
                close_engines()

    async def _serve(self, engine: Engine, reports: Reports | None) -> None:
        server = await AsyncChannel.over(self._channel.sock)
        server.send({"ready": True})
        driving: dict[asyncio.Task[None], Message] = {}
        while (message := await server.receive()) is not None and message["do"] != "end":
            task = asyncio.create_task(self._drive(engine, reports, message, server))
            driving[task] = message
            task.add_done_callback(driving.pop)
        # the next server receives the requests again, and must not drive them too
        locks = [RunLock.take(self._folder, one["run_id"]) for one in driving.values()]
        while driving:
            await asyncio.wait(driving)
        for lock in locks:
            if lock is not None:
                lock.release()
        server.close()

    async def _drive(self, engine: Engine, reports: Reports | None, message: Message, server: AsyncChannel) -> None:
        """Drives an execution, and reports its end to the run server: another process may drive it from then on."""
        try:
            if driver_of(self._folder, message["run_id"]) is None:  # else a driver of an earlier server drives it
                with LogContext(execution_id=int(message["id"])):
                    await self._drive_to_end(engine, reports, int(message["id"]))
        except Exception:
            logger.exception("execution %s is left to the recovery", message["id"])
        finally:
            self._count += 1
            server.send({"ended": message["id"], "needs_replacement": self._needs_replacement()})

    async def _drive_to_end(self, engine: Engine, reports: Reports | None, execution_id: int) -> None:
        await engine.liveness.hold(execution_id)
        try:
            execution = await engine.runtime.load(execution_id)
            fresh = execution.state.is_running
            if fresh:
                if execution.state.visits or execution.state.epoch > 1:  # its driver was killed
                    origin = {RECOVERY: str(execution.state.epoch + 1)}
                    execution = await engine.lifecycle.resume(execution_id, origin=origin, after=execution.state.epoch)
                state = await engine.drive(execution, release=False, services=self._services)
                if state is not execution.state:  # it was cancelled
                    execution = await engine.runtime.load(execution_id)
            if reports is not None and not execution.state.is_running:
                await reports.add(execution, fresh=fresh)
        except ExecutionStateError as error:
            logger.warning("%s", error)
        finally:
            await engine.liveness.release(execution_id)

    def _needs_replacement(self) -> bool:
        if self._count % 100:
            return False
        if time.monotonic() > self._released_at + RELEASE_SECONDS:
            release_free_memory()
            self._released_at = time.monotonic()
        grown = psutil.Process().memory_info().rss - self._memory
        return self._count >= MOST_EXECUTIONS or grown > MOST_GROWTH_BYTES


class Reports:
    """Reports executions that end at about the same time together."""

    def __init__(self, reporter: DagsterReporter) -> None:
        self._reporter = reporter
        self._waiting: list[tuple[Execution, bool, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, execution: Execution, *, fresh: bool) -> None:
        """Returns when an execution is reported, or is left to the sensor because Dagster's storage is unavailable."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((execution, fresh, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._report())
        await done

    async def _report(self) -> None:
        while self._waiting:
            await asyncio.sleep(LINGER_SECONDS)
            batch = self._waiting[:REPORTED_AT_ONCE]
            del self._waiting[:REPORTED_AT_ONCE]
            try:
                await self._report_batch([one for one, _, _ in batch], fresh=all(fresh for _, fresh, _ in batch))
            finally:
                for _, _, done in batch:
                    if not done.done():
                        done.set_result(None)

    async def _report_batch(self, executions: list[Execution], *, fresh: bool) -> None:
        for number in range(REPORT_TRIES):
            try:
                await self._reporter.report(executions, fresh=fresh and number == 0)
                return
            except Exception as error:  # of Dagster's storage, or of the log
                logger.warning("%d executions are not reported to Dagster yet: %r", len(executions), error)
                await asyncio.sleep(RETRY_SECONDS)
        logger.error("%d executions are left to the sensor that reports to Dagster", len(executions))
