"""The job and the schedule that release the claims of workers without heartbeats."""

# no `from __future__ import annotations` here: Dagster rejects ops whose annotations are strings

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


def build_reaper(noetl: EngineProvider) -> tuple[JobDefinition, ScheduleDefinition]:
    """Builds the job ``noetl_reaper``, and its schedule, which runs by default."""

    @op(description="Releases the claims of workers that send no heartbeats.")
    def reap(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().reaper().reap())))

    @job(name="noetl_reaper", description="Releases claims whose lease has expired.")
    def noetl_reaper() -> None:
        reap()

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

    return noetl_reaper, reaper
