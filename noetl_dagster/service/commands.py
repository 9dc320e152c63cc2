"""``/api/commands`` and ``/api/events``: the requests of workers before, during and after a command."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field
from starlette.convertors import IntegerConvertor, register_url_convertor

from noetl_dagster.events.transport.capacity import announce_commands
from noetl_dagster.events.transport.wire import EventLimits, EventMessage, Id, Name, Text, accepted
from noetl_dagster.service.access import FOR_WORKERS, Anyone, Worker
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem
from noetl_dagster.service.tokens import LONGEST_WORKER_ID, Principal
from noetl_dagster.settings import DEFAULT_POOL, POOL_NAME
from noetl_dagster.worker.context import MOST_AT_ONCE, Batch, Grant

router = APIRouter(prefix="/api", tags=["commands"], responses=RESPONSES)
workers = APIRouter(prefix="/api", tags=["workers"], dependencies=[FOR_WORKERS], responses=RESPONSES)

MOST_EVENTS = 10_000

LongText = Annotated[Text, Field(max_length=2_000)]


class IdConvertor(IntegerConvertor):
    """An identifier in a path, ``{name:id}``; longer numbers are no identifiers, and other routes match."""

    regex = "[0-9]{1,19}"


register_url_convertor("id", IdConvertor())

CommandId = Annotated[Text, Path(max_length=2_000, description="of the command, or its command.issued event")]

Pool = Annotated[Name, Field(pattern=POOL_NAME, description="the worker's pool, whose commands it claims")]


class Claim(BaseModel):
    """Claims commands. A claim that is sent again with the same ids gets the same answer.

    Attributes:
        worker_id: name of the worker.
        event_ids: ids of the ``command.claimed`` events, one for each free slot of the worker.
        limits: slots by tool kind, for kinds with fewer.
        known: versions of executions whose states the worker has. The answer contains the states of others.
        command_ids: the only commands to claim, which ``limits`` do not bound.
    """

    worker_id: Annotated[Name, Field(min_length=1, max_length=LONGEST_WORKER_ID)]
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

    worker_id: Annotated[Name, Field(min_length=1, max_length=LONGEST_WORKER_ID)]
    event_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_AT_ONCE)]
    pool: Pool = DEFAULT_POOL


class Released(BaseModel):
    """The outcome of a release.

    Attributes:
        queued: commands that wait for a worker again. The others had ended, or another worker holds them.
    """

    queued: int


class PlaybookSource(BaseModel):
    """Text of a playbook, and the catalog path under which it ran."""

    catalog_id: str
    path: str
    source: str
    model: str | None = None


@router.get("/commands/{command_id:path}")
async def get_command(command_id: CommandId, plane: ThePlane, sender: Anyone) -> Grant:
    """Returns the context of a command that waits or runs; 404 once it has ended. Workers get those that they hold."""
    grant = await plane.claims.queued(command_id)
    if grant is None or not await plane.may_read(sender, grant.execution_id, command_id=grant.command_id):
        raise ApiProblem(
            404, f"command {command_id[:200]} is not queued: it has ended, was never issued, or is another worker's"
        )
    return grant


@workers.post("/commands/claim", response_model=Batch)
async def claim_commands(claim: Claim, plane: ThePlane, sender: Worker) -> Response:
    """Claims as many commands as there are ``event_ids``, or fewer if no more wait; executions take turns."""
    _check(sender, claim.worker_id, claim.pool)
    only = claim.command_ids
    claimed = await plane.claims.claim(claim.worker_id, claim.event_ids, claim.limits, claim.pool, only=only)
    plane.metrics.claim_sizes.observe(sum(len(one.waited) for one in claimed))
    versions = {one.execution_id: one.state_version for one in claimed}
    unknown = {execution_id for execution_id, version in versions.items() if claim.known.get(execution_id) != version}
    states = {execution_id: await plane.states.of(execution_id, versions[execution_id]) for execution_id in unknown}
    return Response(plane.claims.answer(claimed, states), media_type="application/json")


@workers.post("/commands/release")
async def release_commands(release: Release, plane: ThePlane, sender: Worker) -> Released:
    """Returns claims to the queue at once, for a worker that stops before it has begun their commands."""
    _check(sender, release.worker_id, release.pool)
    queued = await plane.claims.release(release.worker_id, release.event_ids, release.pool)
    if queued:
        await announce_commands(plane.client, queued, release.pool)
    return Released(queued=queued)


@router.get("/catalog/{catalog_id:id}")
async def get_source(catalog_id: Annotated[Id, Path()], plane: ThePlane, sender: Anyone) -> PlaybookSource:
    """Returns the text of a playbook that was run, which never changes; workers get those of commands they hold."""
    run = await plane.engine.runtime.log.source(catalog_id)
    if run is None or not await plane.may_read(sender, catalog_id=catalog_id):
        raise ApiProblem(404, f"no playbook {catalog_id} in the catalog")
    return PlaybookSource(catalog_id=str(catalog_id), path=run.path, source=run.content, model=run.model)


class EventBatch(BaseModel):
    """Events of any executions."""

    events: Annotated[list[EventMessage], Field(max_length=MOST_EVENTS)]


class Accepted(BaseModel):
    """``new`` events were appended to the log, which had the other accepted ones already.

    ``refused``: ids of events whose sender does not hold the command; if that are all of them, the answer is 409.
    """

    accepted: int
    new: int
    refused: list[str] = []


@workers.post("/events", status_code=202)
async def post_event(message: EventMessage, plane: ThePlane, sender: Worker) -> Accepted:
    """Appends one event."""
    return await _append([message], plane, sender)


@workers.post("/events/batch", status_code=202)
async def post_events(batch: EventBatch, plane: ThePlane, sender: Worker) -> Accepted:
    """Appends events whose sender holds the command; malformed ones, none. Sending a batch twice is harmless."""
    return await _append(batch.events, plane, sender)


async def _append(messages: Sequence[EventMessage], plane: Plane, sender: Principal) -> Accepted:
    received, limits = datetime.now(UTC), EventLimits.of(plane.engine.runtime.settings)
    events = [accepted(message, received, limits) for message in messages]
    for worker_id in {event.worker_id for event in events}:
        _check(sender, worker_id)
    unknown = await plane.handler.unknown_executions({event.execution_id for event in events})
    if unknown:
        raise ApiProblem(404, f"no execution {min(unknown)} in the event log")
    taken = await plane.handler.take_events(events, sender.pools)
    plane.metrics.count_posted(len(events), (datetime.now(UTC) - received).total_seconds())
    if events and len(taken.refused) == len(events):
        raise ApiProblem(
            409,
            f"the sender does not hold command {str(events[0].meta['command_id'])[:200]}: it has ended, was never "
            "issued, or another claim holds it; payload.parent_event_id must be the claim_event_id of the claim, and "
            "meta must be the meta of the command's context",
        )
    refused = sorted(map(str, taken.refused))
    return Accepted(accepted=len(events) - len(refused), new=len(taken.new), refused=refused)


def _check(sender: Principal, worker_id: str | None, pool: str | None = None) -> None:
    """Raises 403 if the sender may not act as a worker of a pool."""
    if (refusal := sender.refusal(worker_id, pool)) is not None:
        raise ApiProblem(403, refusal)
