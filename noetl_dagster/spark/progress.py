"""Reports the progress of a job, in stages and tasks, while the driver waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from noetl_dagster.spark.metrics import ConnectMetrics
from noetl_dagster.spark.sessions import is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = 1.0
"""Seconds between two queries of Spark's status."""


@asynccontextmanager
async def reporting(spark: SparkSession, group: str, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Reports the progress of a job group until the block ends; for Connect see :func:`report_connected`."""
    telling = asyncio.create_task(report(spark, group, tell)) if is_classic(spark) else None
    try:
        yield
    finally:
        if telling is not None:
            telling.cancel()
            with suppress(BaseException):
                await telling


async def report(spark: SparkSession, group: str, tell: Callable[[str], None]) -> None:
    """Reports each change of a job group's progress until it is cancelled."""
    reported = ""
    while True:
        await asyncio.sleep(INTERVAL)
        found = await asyncio.to_thread(describe, spark, group)
        if found and found != reported:
            tell(found)
            reported = found


def report_connected(
    session: SparkSession, tell: Callable[[str], None], kept: ConnectMetrics | None = None
) -> None:
    """Reports the progress of all operations of a Connect session, whose server does not name them.

    Args:
        kept: collects the reports as metrics.
    """

    def on_progress(stages: Iterable[Any] | None, **_: object) -> None:
        if kept is not None:
            kept.add_stages(stages or ())
        running = [stage for stage in stages or () if stage.num_tasks and not stage.done]
        if running:
            tell(
                "; ".join(_stage(one.stage_id, "", one.num_completed_tasks, one.num_tasks) for one in running)
            )

    session.registerProgressHandler(on_progress)  # type: ignore[arg-type]


def failed_stage(spark: SparkSession, group: str) -> str:
    """Returns for example ``stage 3 'save'``; empty if no stage of the group failed or it is unknown."""
    with suppress(Exception):
        tracker = spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        for job in jobs:
            stages = [tracker.getStageInfo(number) for number in (job.stageIds if job is not None else ())]
            for stage in stages:
                if stage is not None and stage.numFailedTasks:
                    return f"stage {stage.stageId}{_named(stage.name)}"
    return ""


def _named(stage_name: str) -> str:
    """Returns the operation in a stage's name: `` 'save'`` of ``save at NativeMethodAccessorImpl.java:0``.

    Empty for a function without a name, which Scala calls ``$anonfun$withThreadLocalCaptured$1`` or the like.
    """
    operation = stage_name.partition(" at ")[0]
    return f" {operation!r}" if operation and not operation.startswith("$") else ""


def describe(spark: SparkSession, group: str) -> str:
    """Returns for example ``spark stage 3 'save': 4/8 tasks``; empty if nothing of the group runs."""
    tracker = spark.sparkContext.statusTracker()
    running = []
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        if info is None or info.status != "RUNNING":
            continue
        for number in info.stageIds:
            stage = tracker.getStageInfo(number)
            if stage is not None and stage.numActiveTasks:
                running.append(_stage(number, _named(stage.name), stage.numCompletedTasks, stage.numTasks))
    return "; ".join(running)


def _stage(number: int, name: str, completed: int, tasks: int) -> str:
    return f"spark stage {number}{name}: {completed}/{tasks} tasks"
