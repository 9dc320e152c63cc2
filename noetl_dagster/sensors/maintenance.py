"""The job and the schedule that apply the retention of the event log."""

# no `from __future__ import annotations` here: Dagster rejects ops whose annotations are strings

from dagster import DefaultScheduleStatus, JobDefinition, OpExecutionContext, ScheduleDefinition, job, op

from noetl_dagster.resources.engines import EngineProvider

MAINTENANCE_CRON = "17 3 * * *"


def build_maintenance(noetl: EngineProvider) -> tuple[JobDefinition, ScheduleDefinition]:
    """Builds the job ``noetl_maintenance``, and its schedule, which runs by default."""

    @op(description="Creates the partitions of the coming months, drops old ones, and deletes expired results.")
    def maintain(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().maintenance().run())))

    @job(name="noetl_maintenance", description="Applies the retention of the event log.")
    def noetl_maintenance() -> None:
        maintain()

    nightly = ScheduleDefinition(
        name="noetl_maintenance",
        job=noetl_maintenance,
        cron_schedule=MAINTENANCE_CRON,
        default_status=DefaultScheduleStatus.RUNNING,
        description="Every night.",
    )
    return noetl_maintenance, nightly
