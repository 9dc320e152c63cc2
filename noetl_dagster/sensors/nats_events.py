"""The sensor that stores worker events from NATS, and reports executions outside of Dagster as assets."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dagster import DefaultSensorStatus, SensorDefinition, SensorEvaluationContext, SensorResult, sensor
from pydantic import TypeAdapter

from noetl_dagster.compiler.automation import read_cursor
from noetl_dagster.compiler.reporting import DagsterReporter
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import EndPosition, ended_outside
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.resources.engines import EngineProvider

if TYPE_CHECKING:
    from noetl_dagster.events.transport.ingest import IngestReport

logger = logging.getLogger(__name__)

EVENTS_INTERVAL = 15
"""Seconds between two ticks. Events do not depend on them if ``noetl-dagster ingest`` or ``serve`` runs."""

EVENTS_SECONDS = 20.0
"""Time limit of a tick; the next tick takes the remaining events."""

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


async def drain(engine: Engine) -> IngestReport:
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
