"""The sensor that moves worker events from NATS to the log, and reports executions that finished outside of Dagster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dagster import (
    AssetKey,
    AssetMaterialization,
    DefaultSensorStatus,
    MetadataValue,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)
from pydantic import ValidationError

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import EndPosition, finished_outside, reference_of
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.state import StepStatus
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.io_managers.results import metadata_of
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.worker.execution import Execution

if TYPE_CHECKING:
    from noetl_dagster.events.transport.ingest import IngestReport

logger = logging.getLogger(__name__)

INTERVAL = 15
"""Seconds between two ticks. Events do not depend on them if ``noetl-dagster ingest`` or ``serve`` runs."""

MOST_SECONDS = 20.0
"""Time limit of a tick; the next tick takes the remaining events."""


def build_event_sensor(noetl: EngineProvider) -> SensorDefinition:
    """Builds the sensor. It may run next to any number of ingestors: each event is stored once.

    Its cursor is the position in the log up to which finished executions are reported.
    """

    @sensor(
        name="noetl_events",
        description="Stores worker events from NATS, and reports results of executions outside of Dagster as assets.",
        minimum_interval_seconds=INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_events(context: SensorEvaluationContext) -> SensorResult:
        engine = noetl.engine()
        try:
            taken = str(noetl.run(drain(engine)))
        except ServiceError as error:  # finished executions can still be reported
            taken = f"no events taken: {error}"
        executions, position = noetl.run(finished_outside(engine.runtime, position_of(context.cursor)))
        materialised = [event for execution in executions for event in _materialised(noetl, execution)]
        for execution in executions:
            context.log.info(
                f"execution {execution.id} of {execution.playbook.name} completed outside of Dagster"
            )
        context.log.info(taken)
        report = f"{len(materialised)} assets of {len(executions)} executions reported"
        return SensorResult(
            skip_reason=f"{taken}; {report if executions else 'nothing to report'}",
            cursor=position.model_dump_json(),
            asset_events=materialised,
        )

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
        return await ingestor.drain(most_seconds=MOST_SECONDS)
    finally:
        await ingestor.close()
        await client.close()


def position_of(cursor: str | None) -> EndPosition:
    """Returns the position of a cursor; the beginning if there is none, or if it is invalid."""
    try:
        return EndPosition.model_validate_json(cursor) if cursor else EndPosition()
    except ValidationError:
        logger.warning("the cursor %r is no position; finished executions are reported again", cursor)
        return EndPosition()


def _materialised(noetl: EngineProvider, execution: Execution) -> Iterator[AssetMaterialization]:
    for end in execution.state.latest.values():
        if end.status is not StepStatus.COMPLETED:
            continue
        reference = noetl.run(reference_of(noetl.engine().runtime, execution.id, end))
        yield AssetMaterialization(
            asset_key=AssetKey(execution.playbook.asset_key(end.step)),
            description=f"step {end.step} of execution {execution.id}, run outside of Dagster",
            metadata={**metadata_of(reference), "execution_id": MetadataValue.text(str(execution.id))},
        )
