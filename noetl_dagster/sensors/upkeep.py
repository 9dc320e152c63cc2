"""What keeps the log in order: worker events from NATS, the projection, the reaper and the maintenance."""

# no `from __future__ import annotations` here: Dagster rejects ops whose annotations are strings

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    SensorResult,
    SkipReason,
    job,
    op,
    schedule,
    sensor,
)
from pydantic import TypeAdapter

from noetl_dagster.compiler.automation import read_cursor
from noetl_dagster.compiler.reporting import DagsterReporter
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import EndPosition, ended_outside
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.resources.engines import EngineProvider

if TYPE_CHECKING:
    from noetl_dagster.events.transport.ingest import IngestReport

logger = logging.getLogger(__name__)

EVENTS_INTERVAL = 15
"""Seconds between two ticks. Events do not depend on them if ``noetl-dagster ingest`` or ``serve`` runs."""

EVENTS_SECONDS = 20.0
"""Time limit of a tick; the next tick takes the remaining events."""

REAPER_CRON = "* * * * *"
MAINTENANCE_CRON = "17 3 * * *"

PROJECTION_INTERVAL = 30
"""Seconds between two ticks. Runs update the projection themselves; the sensor handles the remaining events."""


POSITION = TypeAdapter(EndPosition)


def build_event_sensor(noetl: EngineProvider) -> SensorDefinition:
    """Builds the sensor. It may run next to any number of ingestors: each event is stored once.

    Its cursor is the position in the log up to which ended executions are reported.
    """

    @sensor(
        name="noetl_events",
        description="Stores worker events from NATS, and reports results of executions outside of Dagster as assets.",
        minimum_interval_seconds=EVENTS_INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_events(context: SensorEvaluationContext) -> SensorResult:
        engine = noetl.engine()
        try:
            taken = str(noetl.run(drain(engine)))
        except ServiceError as error:  # finished executions can still be reported
            taken = f"no events taken: {error}"
        reporter, began = DagsterReporter(engine, context.instance), time.monotonic()
        made, count, more = 0, 0, True
        position = read_cursor(context, POSITION, EndPosition(), "finished executions are reported again")
        while more and time.monotonic() < began + EVENTS_SECONDS:
            executions, after = noetl.run(ended_outside(engine.runtime, engine.liveness, position))
            made += noetl.run(reporter.report(executions))
            count += len(executions)
            position, more = after, after != position
        context.log.info(taken)
        report = f"{made} assets of {count} executions reported" if count else "nothing to report"
        return SensorResult(skip_reason=f"{taken}; {report}", cursor=position.model_dump_json())

    return noetl_events


async def drain(engine: Engine) -> "IngestReport":
    """Stores the events that are in the stream now."""
    # not before a tick: NATS takes 0.3 s to import
    from noetl_dagster.events.transport.ingest import Ingestor
    from noetl_dagster.events.transport.nats import connect

    runtime = engine.runtime
    client = await connect(runtime.settings, "sensor")
    handler = EventHandler(runtime.log, runtime.settings.command_heartbeat_timeout_seconds)
    ingestor = Ingestor(client, handler)
    try:
        for difference in await ingestor.open():
            logger.warning("%s", difference)
        return await ingestor.drain(most_seconds=EVENTS_SECONDS)
    finally:
        await ingestor.close()
        await client.close()


def build_upkeep(noetl: EngineProvider) -> tuple[Sequence[JobDefinition], Sequence[ScheduleDefinition]]:
    """Builds the jobs ``noetl_reaper`` and ``noetl_maintenance``, and their schedules, which run by default."""

    @op(description="Releases the claims of workers that send no heartbeats.")
    def reap(context: OpExecutionContext) -> None:
        context.log.info(str(noetl.run(noetl.engine().reaper().reap())))

    @op(description="Creates the partitions of the coming months, drops old ones, and deletes expired results.")
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
