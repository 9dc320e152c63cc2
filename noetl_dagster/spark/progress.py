"""Reports the progress of a job, in stages and tasks, while the driver waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from noetl_dagster.spark.metrics import ConnectMetrics
from noetl_dagster.spark.sessions import is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = 1.0  # seconds between two queries of Spark's status


@asynccontextmanager
async def reporting(spark: SparkSession, group: str, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Reports the progress of a job group until the block ends; for Connect see :func:`report_connected`."""
    if not is_classic(spark):
        yield
        return
    telling = asyncio.create_task(_report(spark, group, tell))
    try:
        yield
    finally:
        telling.cancel()
        with suppress(BaseException):
            await telling


async def _report(spark: SparkSession, group: str, tell: Callable[[str], None]) -> None:
    reported = ""
    while True:
        await asyncio.sleep(INTERVAL)
        found = await asyncio.to_thread(_describe, spark, group)
        if found and found != reported:
            tell(found)
            reported = found


def report_connected(session: SparkSession, tell: Callable[[str], None], kept: ConnectMetrics) -> None:
    """Reports the progress of all operations of a Connect session, whose server does not name them, and keeps it."""

    def on_progress(stages: Iterable[Any] | None, **_: object) -> None:
        kept.add_stages(stages or ())
        running = [one for one in stages or () if one.num_tasks and not one.done]
        texts = [_stage(one.stage_id, "", one.num_completed_tasks, one.num_tasks) for one in running]
        if texts:
            tell("; ".join(texts))

    session.registerProgressHandler(on_progress)  # type: ignore[arg-type]


def failed_stage(spark: SparkSession, group: str) -> str:
    """Returns for example ``stage 3 'save'``; empty if no stage of the group failed or it is unknown."""
    with suppress(Exception):
        for stage in _stages(spark, group):
            if stage.numFailedTasks:
                return f"stage {stage.stageId}{_named(stage.name)}"
    return ""


def _stages(spark: SparkSession, group: str, *, running: bool = False) -> Iterator[Any]:
    """Yields the stages of a group's jobs, or only of those that run."""
    tracker = spark.sparkContext.statusTracker()
    for number in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(number)
        if job is not None and (not running or job.status == "RUNNING"):
            stages = map(tracker.getStageInfo, job.stageIds)
            yield from (stage for stage in stages if stage is not None)


def _named(stage_name: str) -> str:
    """Returns the operation in a stage's name: `` 'save'`` of ``save at NativeMethodAccessorImpl.java:0``.

    Empty for a function without a name, which Scala calls ``$anonfun$withThreadLocalCaptured$1`` or the like.
    """
    operation = stage_name.partition(" at ")[0]
    return f" {operation!r}" if operation and not operation.startswith("$") else ""


def _describe(spark: SparkSession, group: str) -> str:
    """Returns for example ``spark stage 3 'save': 4/8 tasks``; empty if nothing of the group runs."""
    return "; ".join(
        _stage(stage.stageId, _named(stage.name), stage.numCompletedTasks, stage.numTasks)
        for stage in _stages(spark, group, running=True)
        if stage.numActiveTasks
    )


def _stage(number: int, name: str, completed: int, tasks: int) -> str:
    return f"spark stage {number}{name}: {completed}/{tasks} tasks"
