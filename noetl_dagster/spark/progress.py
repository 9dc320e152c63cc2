"""How far a job is: stages and tasks of a job group, told while the driver waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
                name = stage.name.partition(" at ")[0]
                running.append(
                    f"spark stage {number} {name!r}: {stage.numCompletedTasks}/{stage.numTasks} tasks"
                )
    return "; ".join(running)
