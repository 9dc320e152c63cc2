"""Progress and metrics of the jobs of one call: stages, tasks, shuffle, spill and skew, from Spark's own status.

A Connect client gets fewer metrics: the server reports the stages of each operation, and the metrics of the plan only
for a query whose rows the client fetches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from noetl_dagster.spark.sessions import VECTORED, is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from noetl_dagster.spark.sources.results import StoredPart

INTERVAL = 1.0  # seconds between two queries of Spark's status

_SUMS = {
    "input_bytes": "inputBytes",
    "output_bytes": "outputBytes",
    "shuffle_read_bytes": "shuffleReadBytes",
    "shuffle_write_bytes": "shuffleWriteBytes",
    "memory_spilled_bytes": "memoryBytesSpilled",
    "disk_spilled_bytes": "diskBytesSpilled",
}
_PLAN_SUMS = {
    "shuffleBytesWritten": "shuffle_write_bytes",
    "localBytesRead": "shuffle_read_bytes",
    "remoteBytesRead": "shuffle_read_bytes",
    "spillSize": "memory_spilled_bytes",
}
"""Metrics of plan nodes that Connect sends with a query's rows, and the sums that they add to."""

NOT_REPORTED = "shuffle, spill and skew of what is written: a Spark Connect server tells its clients stages and tasks"
_LEAST_TASKS = 2
_LEAST_MILLISECONDS = 100  # the times of shorter tasks depend more on the scheduler than on the data


class InputBytes:
    """The bytes that a call reads and Spark does not count.

    Spark counts the bytes of its own readers: of staged objects the copy, and of Python data sources nothing.
    """

    def __init__(self) -> None:
        self._staged = 0
        self._others: int | None = 0
        self._has_files = False

    def add_staged(self, parts: Iterable[StoredPart]) -> None:
        """Adds objects that were fetched and staged for the JVM."""
        self._staged += sum(part.bytes_size for part in parts)

    def add_sourced(self, parts: Iterable[StoredPart]) -> None:
        """Adds objects that the data source reads; if it opens one, the amount it will read is unknown."""
        for part in parts:
            if self._others is not None:
                self._others = self._others + part.bytes_size if part.is_whole else None

    def add_fetched(self, size: int) -> None:
        """Adds the bytes of objects that the driver fetched."""
        if self._others is not None:
            self._others += size

    def add_files(self) -> None:
        """Records that an input is files or a table, which Spark reads itself."""
        self._has_files = True

    def total(self, counted: int | None, spark: SparkSession) -> int | None:
        """Returns the bytes that the call has read, with those that Spark has counted; None if unknown."""
        if self._others is None:
            return None
        if self._staged:
            return None if self._has_files else self._staged + self._others
        if counted is None or (counted and spark.conf.get(VECTORED, "true") != "false"):
            return None
        return counted + self._others


def metrics_of(spark: SparkSession, group: str) -> dict[str, int | float | str]:
    """Returns metrics of a job group, for the envelope's ``spark`` and asset metadata.

    Returns:
        ``jobs``, ``stages``, ``tasks``, ``task_seconds`` (of all tasks together), bytes read, written,
        shuffled and spilled, and ``skew``: the longest task of a stage over its median one, of the worst
        stage; 1 if all take the same time. For Connect see :class:`ConnectMetrics`.
    """
    metrics: dict[str, int | float | str] = {}
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


class ConnectMetrics:
    """Metrics that a Connect server reports of one call's operations, during and after their run."""

    def __init__(self) -> None:
        self._stages: dict[int, tuple[int, int]] = {}
        self._sums: dict[str, int] = {}

    def add_stages(self, stages: Iterable[Any]) -> None:
        """Adds a progress report; the last one of a stage counts, which may be slightly outdated."""
        for stage in stages:
            self._stages[stage.stage_id] = stage.num_completed_tasks, stage.num_bytes_read

    def add_query(self, execution: Any) -> None:
        """Adds the ``executionInfo`` of a DataFrame whose rows were fetched; None in classic sessions."""
        plan = execution.metrics if execution is not None else None
        for node in plan.extract_graph()[1].values() if plan is not None else ():
            for metric in node.metrics:
                if (name := _PLAN_SUMS.get(metric.name)) is not None:
                    self._sums[name] = self._sums.get(name, 0) + int(metric.value)

    def metrics(self) -> dict[str, int | float | str]:
        """Returns ``stages``, ``tasks``, ``input_bytes``, of fetched rows shuffle and spill; ``not_told``: the rest."""
        ran = [one for one in list(self._stages.values()) if one[0]]
        return {
            "stages": len(ran),
            "tasks": sum(tasks for tasks, _ in ran),
            "input_bytes": sum(read for _, read in ran),
            **self._sums,
            "not_told": NOT_REPORTED,
        }


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


def report_connected(session: SparkSession, tell: Callable[[str], None], metrics: ConnectMetrics) -> None:
    """Reports the progress of all operations of a Connect session, whose server does not name them, and keeps it."""

    def on_progress(stages: Iterable[Any] | None, **_: object) -> None:
        metrics.add_stages(stages or ())
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
