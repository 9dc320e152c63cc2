"""How far a job is: stages and tasks of a job group, told while the driver waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = 1.0
"""Seconds between two looks at Spark's status."""


async def report(spark: SparkSession, group: str, tell: Callable[[str], None]) -> None:
    """Tells each change of a job group's progress until it is cancelled."""
    told = ""
    while True:
        await asyncio.sleep(INTERVAL)
        said = await asyncio.to_thread(describe, spark, group)
        if said and said != told:
            tell(said)
            told = said


def failed_stage(spark: SparkSession, group: str) -> str:
    """For example ``stage 3 'save'``; empty when no stage of the group failed, or nobody can tell."""
    with suppress(Exception):
        tracker = spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        for job in jobs:
            stages = [tracker.getStageInfo(number) for number in (job.stageIds if job is not None else ())]
            for stage in stages:
                if stage is not None and stage.numFailedTasks:
                    return f"stage {stage.stageId} {_operation(stage.name)!r}"
    return ""


def _operation(stage_name: str) -> str:
    """Spark names a stage after the call that caused it: ``save at NativeMethodAccessorImpl.java:0``."""
    return stage_name.partition(" at ")[0]


def describe(spark: SparkSession, group: str) -> str:
    """For example ``spark stage 3 'save': 4/8 tasks``; empty when nothing of the group runs."""
    tracker = spark.sparkContext.statusTracker()
    running = []
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        if info is None or info.status != "RUNNING":
            continue
        for number in info.stageIds:
            stage = tracker.getStageInfo(number)
            if stage is not None and stage.numActiveTasks:
                done = f"{stage.numCompletedTasks}/{stage.numTasks} tasks"
                running.append(f"spark stage {number} {_operation(stage.name)!r}: {done}")
    return "; ".join(running)
