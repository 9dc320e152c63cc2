"""Progress and metrics of the jobs of one call: stages, tasks, shuffle, spill and skew, from Spark's own status.

A Connect server reports progress, but no metrics of what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from noetl_dagster.spark.sessions import is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = 1.0  # seconds between two queries of Spark's status

_SUMS = {
    "input_bytes": "inputBytes",
    "shuffle_read_bytes": "shuffleReadBytes",
    "shuffle_write_bytes": "shuffleWriteBytes",
    "memory_spilled_bytes": "memoryBytesSpilled",
    "disk_spilled_bytes": "diskBytesSpilled",
}
_LEAST_TASKS = 2
_LEAST_MILLISECONDS = 100  # the times of shorter tasks depend more on the scheduler than on the data


def metrics_of(spark: SparkSession, group: str) -> dict[str, int | float]:
    """Returns metrics of a job group, for the envelope's ``spark`` and asset metadata.

    Returns:
        ``jobs``, ``stages``, ``tasks``, ``task_seconds`` (of all tasks together), bytes read by Spark's own
        readers, shuffled and spilled, and ``skew``: the longest task of a stage over its median one, of the worst
        stage; 1 if all take the same time. Empty for Connect.
    """
    metrics: dict[str, int | float] = {}
    if not is_classic(spark):
        return metrics
    # metrics are for display: a session that ends now must not fail completed work
    with suppress(Exception):
        store = spark.sparkContext._jsc.sc().statusStore()
        tracker = spark.sparkContext.statusTracker()
        jobs = [info for job in tracker.getJobIdsForGroup(group) if (info := tracker.getJobInfo(job))]
        stages = [store.lastStageAttempt(stage) for stage in {one for job in jobs for one in job.stageIds}]
        ran = [stage for stage in stages if stage.numCompleteTasks() > 0]  # others were computed before
        metrics = {"jobs": len(jobs), "stages": len(ran)}
        metrics["tasks"] = sum(stage.numCompleteTasks() for stage in ran)
        metrics["task_seconds"] = round(sum(stage.executorRunTime() for stage in ran) / 1000, 3)
        for name, getter in _SUMS.items():
            metrics[name] = sum(getattr(stage, getter)() for stage in ran)
        metrics["skew"] = max((_skew(spark, store, stage) for stage in ran), default=1.0)
    return metrics


def _skew(spark: SparkSession, store: Any, stage: Any) -> float:
    """Returns the time of the longest task divided by that of the median one."""
    gateway = spark.sparkContext._gateway
    if stage.numCompleteTasks() < _LEAST_TASKS or gateway is None:
        return 1.0
    quantiles = gateway.new_array(gateway.jvm.double, 2)
    quantiles[0], quantiles[1] = 0.5, 1.0
    summary = store.taskSummary(stage.stageId(), stage.attemptId(), quantiles)
    if summary.isEmpty():
        return 1.0
    times = summary.get().executorRunTime()
    median, longest = times.apply(0), times.apply(1)
    return round(longest / median, 2) if median and longest > _LEAST_MILLISECONDS else 1.0


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
        progress = await asyncio.to_thread(_describe, spark, group)
        if progress and progress != reported:
            tell(progress)
            reported = progress


def report_connected(session: SparkSession, tell: Callable[[str], None]) -> None:
    """Reports the progress of all operations of a Connect session, whose server does not name them."""

    def on_progress(stages: Iterable[Any] | None, **_: object) -> None:
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
