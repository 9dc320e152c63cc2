"""The reaper and the maintenance as scheduled jobs, and the projection as a sensor."""

# no `from __future__ import annotations` here: Dagster rejects ops whose annotations are strings

from collections.abc import Sequence

from dagster import (
    DefaultScheduleStatus,
    DefaultSensorStatus,
    JobDefinition,
    OpExecutionContext,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    job,
    op,
    schedule,
    sensor,
)

from noetl_dagster.events.projection import Projection
from noetl_dagster.resources.engines import EngineProvider

REAPER_CRON = "* * * * *"
MAINTENANCE_CRON = "17 3 * * *"

PROJECTION_INTERVAL = 30
"""Seconds between two ticks. Runs update the projection themselves; the sensor handles the remaining events."""


def build_upkeep(noetl: EngineProvider) -> tuple[Sequence[JobDefinition], Sequence[ScheduleDefinition]]:
    """Builds the jobs ``noetl_reaper`` and ``noetl_maintenance``, and their schedules, which run by default."""

    @op(description="Releases the claims of workers that send no heartbeats.")
    def reap(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().reaper().reap())))

    @op(
        description="Creates the partitions of the coming months, drops old ones, and deletes expired results."
    )
    def maintain(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().maintenance().run())))

    @job(name="noetl_reaper", description="Releases claims whose lease has expired.")
    def noetl_reaper() -> None:
        reap()

    @job(name="noetl_maintenance", description="Applies the retention of the event log.")
    def noetl_maintenance() -> None:
        maintain()

    @schedule(
        name="noetl_reaper",
        job=noetl_reaper,
        cron_schedule=REAPER_CRON,
        default_status=DefaultScheduleStatus.RUNNING,
        description="Checks every minute, and starts a run only if a claim has expired.",
    )
    def reaper(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        overdue = noetl.run(noetl.engine().reaper().overdue())
        return RunRequest() if overdue else SkipReason("no claim has expired")

    maintenance = ScheduleDefinition(
        name="noetl_maintenance",
        job=noetl_maintenance,
        cron_schedule=MAINTENANCE_CRON,
        default_status=DefaultScheduleStatus.RUNNING,
        description="Every night.",
    )
    return [noetl_reaper, noetl_maintenance], [reaper, maintenance]


def build_projection_sensor(noetl: EngineProvider) -> SensorDefinition:
    """Builds a sensor whose ticks update the projection; its skip reasons show the lag."""

    @sensor(
        name="noetl_projection",
        description="Projects the event log into noetl.execution.",
        minimum_interval_seconds=PROJECTION_INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_projection(context: SensorEvaluationContext) -> SkipReason:
        projection = Projection(noetl.engine().runtime.pool)
        taken = noetl.run(projection.catch_up())
        lag = noetl.run(projection.lag_seconds())
        return SkipReason(f"{taken} events projected, {lag:.1f} s behind")

    return noetl_projection
