"""Jobs and schedules of the control plane's upkeep: claims that expired, partitions, expired results."""

# annotations are not postponed here: Dagster refuses ops whose annotations are text

from collections.abc import Sequence

from dagster import (
    DefaultScheduleStatus,
    JobDefinition,
    OpExecutionContext,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    job,
    op,
    schedule,
)

from noetl_dagster.resources.engines import EngineProvider

REAPER_CRON = "* * * * *"
MAINTENANCE_CRON = "17 3 * * *"


def build_upkeep(noetl: EngineProvider) -> tuple[Sequence[JobDefinition], Sequence[ScheduleDefinition]]:
    """The jobs ``noetl_reaper`` and ``noetl_maintenance`` and their schedules, which run by default."""

    @op(description="Gives the commands of silent workers to others.")
    def reap(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().reaper().reap())))

    @op(description="Makes the coming months' partitions, drops old ones, deletes expired results.")
    def maintain(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().maintenance().run())))

    @job(name="noetl_reaper", description="Ends the waiting for workers that crashed or hang.")
    def noetl_reaper() -> None:
        reap()

    @job(name="noetl_maintenance", description="Keeps the event log within its retention.")
    def noetl_maintenance() -> None:
        maintain()

    @schedule(
        name="noetl_reaper",
        job=noetl_reaper,
        cron_schedule=REAPER_CRON,
        default_status=DefaultScheduleStatus.RUNNING,
        description="Every minute; a run only when a claim has expired.",
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
