"""``/api/commands`` and ``/api/events``: the requests of workers before, during and after a command."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from noetl_dagster.events.transport.capacity import announce_commands
from noetl_dagster.events.transport.wire import EventMessage, Id, Name, Text, accepted
from noetl_dagster.events.types import EventType
from noetl_dagster.service.access import FOR_ALL, FOR_WORKERS
from noetl_dagster.service.hot import HotRouter
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem
from noetl_dagster.settings import DEFAULT_POOL, POOL_NAME
from noetl_dagster.worker.context import MOST_AT_ONCE, Batch, Grant

router = APIRouter(prefix="/api", tags=["commands"], responses=RESPONSES)
hot = HotRouter(prefix="/api", needs=FOR_WORKERS, tags=["workers"], responses=RESPONSES)

MOST_EVENTS = 10_000

LongText = Annotated[Text, Field(max_length=2_000)]
CommandId = Annotated[Text, Path(max_length=2_000, description="of the command, or its command.issued event")]

Pool = Annotated[Name, Field(pattern=POOL_NAME, description="the worker's pool, whose commands it claims")]


class Claim(BaseModel):
    """``event_ids`` names the ``command.claimed`` events, one for each free slot of the worker.

    A claim that is sent again with the same ids gets the same answer. ``limits``: slots by tool kind, for kinds with
    fewer. ``known``: versions of executions whose states the worker has; the answer holds those of others.
    ``command_ids``: the only commands to claim, which ``limits`` do not bound.
    """

    worker_id: Annotated[Name, Field(min_length=1, max_length=256)]
    event_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_AT_ONCE)]
    limits: Annotated[
        dict[Annotated[Name, Field(max_length=64)], Annotated[int, Field(ge=0, lt=2**31)]],
        Field(max_length=64),
    ] = {}
    known: Annotated[dict[Id, Annotated[str, Field(max_length=64)]], Field(max_length=MOST_AT_ONCE)] = {}
    command_ids: Annotated[list[LongText], Field(max_length=MOST_AT_ONCE)] | None = None
    pool: Pool = DEFAULT_POOL


class Release(BaseModel):
    """Claims of commands that were not begun, by the ids of their ``command.claimed`` events."""

    worker_id: Annotated[Name, Field(min_length=1, max_length=256)]
    event_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_AT_ONCE)]
    pool: Pool = DEFAULT_POOL


class Released(BaseModel):
    """``queued``: commands that wait for a worker again; the others had ended, or another worker holds them."""

    queued: int


class PlaybookSource(BaseModel):
    """Text of a playbook, and the catalog path under which it ran."""

    catalog_id: str
    path: str
    source: str
    model: str | None = None


@router.get("/commands/{command_id:path}", dependencies=[FOR_ALL])
async def get_command(command_id: CommandId, plane: ThePlane) -> Grant:
    """Returns the context of a command that waits or runs; 404 once it has ended."""
    found = await plane.claims.queued(command_id)
    if found is None:
        raise ApiProblem(404, f"command {command_id[:200]} is not queued: it has ended or was never issued")
    return found


@hot.post("/commands/claim", returns=Batch)
async def claim_commands(claim: Claim, plane: ThePlane) -> bytes:
    """Claims as many commands as there are ``event_ids``, or fewer if no more wait; executions take turns."""
    only = claim.command_ids
    claimed = await plane.claims.claim(claim.worker_id, claim.event_ids, claim.limits, claim.pool, only=only)
    plane.metrics.claim_sizes.observe(sum(len(one.waited) for one in claimed))
    unknown = {one.execution_id for one in claimed if claim.known.get(one.execution_id) != one.state_version}
    log = plane.engine.runtime.log
    states = {execution_id: await log.lifecycle(execution_id) for execution_id in unknown}
    return plane.claims.answer(claimed, states)


@hot.post("/commands/release")
async def release_commands(release: Release, plane: ThePlane) -> Released:
    """Returns claims to the queue at once, for a worker that stops before it has begun their commands."""
    queued = await plane.claims.release(release.worker_id, release.event_ids)
    if queued:
        await announce_commands(plane.client, queued, release.pool)
    return Released(queued=queued)


@router.get("/catalog/{catalog_id:int}", dependencies=[FOR_ALL])
async def get_source(catalog_id: Annotated[Id, Path()], plane: ThePlane) -> PlaybookSource:
    """Returns the text of a playbook that was run, which never changes."""
    run = await plane.engine.runtime.log.source(catalog_id)
    if run is None:
        raise ApiProblem(404, f"no playbook {catalog_id} in the catalog")
    return PlaybookSource(catalog_id=str(catalog_id), path=run.path, source=run.content, model=run.model)


class EventBatch(BaseModel):
    """Events of any executions."""

    events: Annotated[list[EventMessage], Field(max_length=MOST_EVENTS)]


class Accepted(BaseModel):
    """``new`` events were appended to the log; it had the others already, or their command had ended."""

    accepted: int
    new: int


@hot.post("/events", status_code=202)
async def post_event(message: EventMessage, plane: ThePlane) -> Accepted:
    """Appends one event. ``command.claimed`` claims its command; 409 if another worker holds it."""
    if message.event_type == EventType.COMMAND_CLAIMED:
        return await _claim_named(message, plane)
    return await _append([message], plane)


@hot.post("/events/batch", status_code=202)
async def post_events(batch: EventBatch, plane: ThePlane) -> Accepted:
    """Appends events, all or none. Sending a batch twice is harmless."""
    return await _append(batch.events, plane)


async def _append(messages: Sequence[EventMessage], plane: Plane) -> Accepted:
    received = datetime.now(UTC)
    events = [accepted(message, received) for message in messages]
    unknown = await plane.handler.unknown_executions({event.execution_id for event in events})
    if unknown:
        raise ApiProblem(404, f"no execution {min(unknown)} in the event log")
    inserted = await plane.handler.handle_events(events)
    plane.metrics.count_posted(len(events), (datetime.now(UTC) - received).total_seconds())
    return Accepted(accepted=len(events), new=len(inserted))


async def _claim_named(message: EventMessage, plane: Plane) -> Accepted:
    command_id = message.meta.get("command_id")
    if not isinstance(command_id, str) or message.worker_id is None:
        raise ApiProblem(422, "a claim needs meta.command_id and worker_id")
    claimed = await plane.claims.claim(message.worker_id, [message.event_id], only=[command_id])
    plane.metrics.claim_sizes.observe(len(claimed))
    if not claimed:
        raise ApiProblem(409, f"command {command_id[:200]} is another worker's, has ended, or is not queued")
    return Accepted(accepted=1, new=1)
