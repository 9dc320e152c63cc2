"""What the jobs of one call cost: shuffle, spill and skew, from Spark's own status store."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SUMS = {
    "input_bytes": "inputBytes",
    "output_bytes": "outputBytes",
    "shuffle_read_bytes": "shuffleReadBytes",
    "shuffle_write_bytes": "shuffleWriteBytes",
    "memory_spilled_bytes": "memoryBytesSpilled",
    "disk_spilled_bytes": "diskBytesSpilled",
}
_LEAST_TASKS = 2
_LEAST_MILLISECONDS = 100
"""Tasks that are shorter say more about the scheduler than about the data."""


def metrics_of(spark: SparkSession, group: str) -> dict[str, int | float]:
    """Metrics of a job group, for the envelope's ``spark`` and asset metadata.

    Returns:
        ``jobs``, ``stages``, ``tasks``, ``task_seconds`` (of all tasks together), bytes read, written,
        shuffled and spilled, and ``skew``: the longest task of a stage over its median one, of the worst
        stage; 1 when all are alike. Empty on Connect, whose clients cannot see the server's status.
    """
    found: dict[str, int | float] = {}
    # the status is for people: a session that dies just now must not fail what is done already
    with suppress(Exception):
        store = spark.sparkContext._jsc.sc().statusStore()
        tracker = spark.sparkContext.statusTracker()
        jobs = [info for job in tracker.getJobIdsForGroup(group) if (info := tracker.getJobInfo(job))]
        stages = [store.lastStageAttempt(stage) for stage in {one for job in jobs for one in job.stageIds}]
        ran = [stage for stage in stages if stage.numCompleteTasks() > 0]  # others were computed before
        found = {"jobs": len(jobs), "stages": len(ran)}
        found["tasks"] = sum(stage.numCompleteTasks() for stage in ran)
        found["task_seconds"] = round(sum(stage.executorRunTime() for stage in ran) / 1000, 3)
        for name, getter in _SUMS.items():
            found[name] = sum(getattr(stage, getter)() for stage in ran)
        found["skew"] = max((_skew(spark, store, stage) for stage in ran), default=1.0)
    return found


def _skew(spark: SparkSession, store: Any, stage: Any) -> float:
    """The longest task over the median one."""
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
