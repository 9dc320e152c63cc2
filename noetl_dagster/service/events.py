"""``/api/events``: what workers report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, Field

from noetl_dagster.events.transport.wire import EventMessage, accepted
from noetl_dagster.events.types import EventType
from noetl_dagster.service.access import FOR_WORKERS
from noetl_dagster.service.hot import HotRouter
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, Problem

hot = HotRouter(prefix="/api/events", needs=FOR_WORKERS, tags=["events"], responses=RESPONSES)

BATCH = 10_000


class EventBatch(BaseModel):
    events: Annotated[list[EventMessage], Field(max_length=BATCH)]


class Accepted(BaseModel):
    """``new`` events went into the log; the others were there already, or their command had ended."""

    accepted: int
    new: int


@hot.post("", status_code=202)
async def post_event(message: EventMessage, plane: ThePlane) -> Accepted:
    """Takes one event. ``command.claimed`` claims its command, and answers 409 when somebody else has it."""
    if message.event_type == EventType.COMMAND_CLAIMED:
        return await _claim(message, plane)
    return await _take([message], plane)


@hot.post("/batch", status_code=202)
async def post_events(batch: EventBatch, plane: ThePlane) -> Accepted:
    """Takes events, all or none. Sending a batch twice is harmless."""
    return await _take(batch.events, plane)


async def _take(messages: Sequence[EventMessage], plane: Plane) -> Accepted:
    received = datetime.now(UTC)
    events = [accepted(message, received) for message in messages]
    unknown = await plane.handler.unknown_executions({event.execution_id for event in events})
    if unknown:
        raise Problem(404, f"no execution {min(unknown)} in the event log")
    inserted = await plane.handler.handle_events(events)
    plane.metrics.count_posted(len(events), (datetime.now(UTC) - received).total_seconds())
    return Accepted(accepted=len(events), new=len(inserted))


async def _claim(message: EventMessage, plane: Plane) -> Accepted:
    command_id = message.meta.get("command_id")
    if not isinstance(command_id, str) or message.worker_id is None:
        raise Problem(422, "a claim needs meta.command_id and worker_id")
    claimed = await plane.claims.claim(message.worker_id, [message.event_id], only=[command_id])
    plane.metrics.count_claims(len(claimed))
    if not claimed:
        raise Problem(409, f"command {command_id[:200]} is another worker's, has ended, or is not queued")
    return Accepted(accepted=1, new=1)
