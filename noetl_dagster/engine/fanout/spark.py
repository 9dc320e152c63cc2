"""The ``spark`` engine of a fan-out: slices of shards as tasks of one Spark job.

Each Python worker of Spark opens a small runtime once and runs slices with the same code as the ``dagster`` engine:
it reads its items from the stored collection, issues and runs their commands, and writes their events in batches. Only
counts go back to the driver. The log has the shards that a lost worker had finished, so the next job skips them.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from noetl_dagster import machine
from noetl_dagster.engine.fanout.shards import Group, GroupReport, run_here
from noetl_dagster.engine.loops.loop_run import LoopRun, begin_loop
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import ShardGranularity
from noetl_dagster.process import logs
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings
from noetl_dagster.spark.failures import failure_of
from noetl_dagster.spark.sessions import cancel, own_session, release
from noetl_dagster.worker.execution import Execution

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SLICES_A_CORE = 4
SLICE_SHARDS = 2_000
"""Shards of one Spark task, at most: as many as a stored part of the collection has items."""

JOBS = 4
"""Jobs of one group, at most: another one follows when a Python worker or an executor was lost."""

CONNECTIONS = 2
SCHEMA = "done long, failed long"


@dataclass(frozen=True, slots=True)
class SliceTask:
    """The part of a Spark job that its Python workers run: slices of a fan-out."""

    settings: Settings
    execution_id: int
    step: str
    visit: int
    loop_id: str
    group: Group
    slice_shards: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the slices whose numbers come in; yields ``done`` and ``failed`` of each."""
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                start = self.group.start + number * self.slice_shards
                part = Group(start, min(start + self.slice_shards, self.group.stop))
                report = run_sync(_run_slice(self, part))
                yield pa.RecordBatch.from_pydict({"done": [report.done], "failed": [report.failed]})


async def run_on_spark(loop_run: LoopRun, group: Group) -> GroupReport:
    """Runs the shards of a group that are not done in the log, as one Spark job.

    Raises:
        ToolError: the job failed for another reason than a lost worker.
        ServiceError: Spark does not start.
    """
    started, runtime = perf_counter(), loop_run.runtime
    await runtime.buffer.flush(loop_run.execution.id)
    for remaining in range(JOBS - 1, -1, -1):
        spark = await asyncio.to_thread(runtime.tool_context.spark_of(loop_run.execution.services))
        try:
            done, failed = await _job(spark, loop_run, group)
            break
        except Exception as error:
            failure = failure_of(error)
            if not failure.retryable or not remaining:
                raise ToolError(
                    f"step {loop_run.step}: the Spark job of its fan-out failed: {failure.message}",
                    kind=failure.kind,
                    code=failure.code,
                    retryable=failure.retryable,
                ) from error
            logger.warning("%s: Spark lost a worker, its shards run again", loop_run.step)
    return GroupReport(group, done, failed, len(group) - done - failed, perf_counter() - started)


async def _job(spark: SparkSession, loop_run: LoopRun, group: Group) -> tuple[int, int]:
    name, settings = f"noetl-fanout-{uuid.uuid4().hex}", loop_run.runtime.settings

    def run() -> tuple[int, int]:
        description = f"{loop_run.step}: shards {group.start} to {group.stop - 1}"
        session = own_session(spark, settings, name, description)
        size = _slice_shards(loop_run, len(group), session)
        own = settings.model_copy(update={"db_pool_size": CONNECTIONS})
        task = SliceTask(own, *loop_run.key, loop_run.loop_id, group, size)
        count = -(-len(group) // size)
        counted = session.range(0, count, 1, count).mapInArrow(task, SCHEMA)
        try:
            row = counted.selectExpr("sum(done) AS done", "sum(failed) AS failed").first()
        finally:
            release(name)
        return int(row["done"] or 0), int(row["failed"] or 0)

    try:
        return await asyncio.shield(asyncio.create_task(asyncio.to_thread(run)))
    except asyncio.CancelledError:
        await asyncio.to_thread(cancel, spark, name)
        raise


def _slice_shards(loop_run: LoopRun, shards: int, session: SparkSession) -> int:
    """Returns a size with which every core gets several slices, and a lost slice is soon done again."""
    if loop_run.program.loop.fanout.granularity is ShardGranularity.PARTITION:
        return 1
    try:
        cores = int(session.sparkContext.defaultParallelism)
    except Exception:  # a Connect session does not report it
        cores = machine.cores()
    return max(1, min(SLICE_SHARDS, -(-shards // (SLICES_A_CORE * cores))))


_runtimes: dict[tuple[int, str | None], Runtime] = {}
_executions: dict[tuple[int, str], Execution] = {}


async def _run_slice(task: SliceTask, part: Group) -> GroupReport:
    """Runs one slice in a Python worker of Spark."""
    runtime = await _runtime(task.settings)
    cache_key = (os.getpid(), task.loop_id)  # each fan-out sees the context of its beginning
    execution = _executions.get(cache_key)
    if execution is None:
        _executions.clear()
        execution = _executions[cache_key] = await runtime.load(task.execution_id)
    if not execution.state.loops.get((task.step, task.visit)):
        raise ToolError(f"execution {task.execution_id}: {task.step} was not expanded", kind="loop")
    loop_run = await begin_loop(runtime, execution.visit(task.step, task.visit), shard=True)
    return await run_here(loop_run, part)


async def _runtime(settings: Settings) -> Runtime:
    """Returns the runtime of this Python worker, which is kept for its later tasks."""
    cache_key = (os.getpid(), settings.db_url)
    runtime = _runtimes.get(cache_key)
    if runtime is None:
        logs.set_up(settings)
        runtime = _runtimes[cache_key] = await Runtime.open(settings, apply=False)
        atexit.register(lambda: run_sync(runtime.close(), timeout=5))
    return runtime
