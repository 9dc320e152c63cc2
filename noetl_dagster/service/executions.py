"""``/api/executions``: start, follow, cancel, resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from noetl_dagster.engine.executions import listing
from noetl_dagster.engine.executions.overview import Overview, full_overview
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.errors import LaunchError, NotDeployedError
from noetl_dagster.events.transport.wire import EventMessage, Id, Name, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.catalog import names_version
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.tracing import origin_of_request
from noetl_dagster.service.access import FOR_OPERATORS, FOR_READERS, Anyone
from noetl_dagster.service.catalog import LENIENT
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem
from noetl_dagster.values import encode_json

router = APIRouter(prefix="/api/executions", tags=["executions"], responses=RESPONSES)

SLICE = 250
"""Events that a page reads from the log at a time, since each may be large."""

ExecutionId = Annotated[Id, Path(description="as it was returned when the execution started")]


class ExecutionSummary(BaseModel):
    """An execution in a list. Times are UTC.

    Attributes:
        execution_id: id of the execution.
        playbook: name of the playbook.
        partition: key of the partition that it makes.
        status: ``RUNNING``, ``COMPLETED``, ``FAILED`` or ``CANCELLED``.
        started_at: time of the start; null while it waits.
        ended_at: time of the end; null while it runs.
    """

    execution_id: str
    playbook: str | None
    partition: str | None = None
    status: str
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, execution: listing.ListedExecution) -> ExecutionSummary:
        """Makes one of an execution of the log."""
        names = ("playbook", "partition", "status", "started_at", "ended_at")
        values = {name: getattr(execution, name) for name in names}
        return cls(execution_id=str(execution.execution_id), **values)


class ExecutionListing(BaseModel):
    """Executions, the newest first."""

    executions: list[ExecutionSummary]


class Execute(BaseModel):
    """A playbook to start. ``workload`` overrides values of the playbook."""

    model_config = ConfigDict(extra="forbid")  # a misspelt workload must not run with the playbook's values

    path: Annotated[Name, Field(min_length=1, description="catalog path; of a registered one also path@2")]
    workload: dict[str, Any] = Field(default_factory=dict)
    partition: Name | None = Field(None, description="of a playbook with partitions, a key as in Dagster")
    lenient: bool = Field(False, description=LENIENT)
    priority: int = Field(0, description="if runs have to wait, those with a larger number start first")
    runner: Runner = Field(
        Runner.DAGSTER,
        description="dagster: in a Dagster run of its own; engine: without one, beside many others in one process",
    )


class Started(BaseModel):
    """The execution that was started."""

    execution_id: str


class Cancel(BaseModel):
    """Why an execution is cancelled."""

    reason: Annotated[Name, Field(min_length=1)] = "cancelled on request"


class Cancelled(BaseModel):
    """The outcome of a cancellation.

    Attributes:
        execution_id: id of the execution.
        cancelled: false if the execution had ended already.
    """

    execution_id: str
    cancelled: bool


class EventPage(BaseModel):
    """Events in the order of their ids. ``more``: others follow; ask for those ``after`` the last id."""

    events: list[EventMessage]
    more: bool = False


@router.get("", dependencies=[FOR_READERS])
async def list_executions(
    plane: ThePlane,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    after: Annotated[Id, Query(description="only executions with a larger id")] = 0,
    partition: Annotated[Name | None, Query(description="only those of the partition with this key")] = None,
    asset: Annotated[
        Name | None, Query(description="only those that made a result of this asset, as warehouse/patients")
    ] = None,
) -> ExecutionListing:
    """Lists executions, the newest first."""
    pool = plane.engine.runtime.pool
    wanted = listing.ExecutionFilter(after=after, partition=partition, asset=asset)
    executions = await listing.list_executions(pool, wanted, limit, seconds=None)
    return ExecutionListing(executions=[ExecutionSummary.of(execution) for execution in executions])


@router.post("/execute", status_code=202, dependencies=[FOR_OPERATORS])
async def execute(
    request: Execute,
    plane: ThePlane,
    traceparent: Annotated[
        str | None, Header(description="W3C Trace Context: the execution's trace links to this span")
    ] = None,
) -> Started:
    """Starts a playbook of the service's folder, or a registered one, as its Dagster job or without a Dagster run.

    The execution is in the log before the answer: it can be followed and cancelled at once, and if its process
    does not start, recovery starts it.
    """
    playbook = await _playbook(plane, request.path.strip("/"), lenient=request.lenient)
    lifecycle = plane.engine.lifecycle
    await plane.launcher.check(playbook, request.runner)
    partition = None
    if request.partition is not None or playbook.dagster.partitions:
        partition = await asyncio.to_thread(plane.choose_partition, playbook, request.workload, request.partition)
    effective = (
        request.workload if partition is None else request.workload | partition.workload(playbook.dagster.partitions)
    )
    await plane.checker.check(playbook, effective)
    origin = origin_of_request(traceparent)
    if request.runner is Runner.ENGINE:
        origin = {**origin, "runner": request.runner.value}
    execution = await lifecycle.create(playbook, request.workload, partition=partition, origin=origin)
    try:
        await plane.launcher.launch(playbook, execution.id, request.workload, request.priority, request.runner)
    except Exception as error:
        # the caller may try again: this execution must not start later
        await lifecycle.fail(execution, f"the run did not start: {error}")
        if not isinstance(error, OSError | LaunchError | NotDeployedError):
            raise
        raise ApiProblem(503, f"the run of execution {execution.id} did not start: {error}") from error
    return Started(execution_id=str(execution.id))


async def _playbook(plane: Plane, path: str, *, lenient: bool) -> Playbook:
    """Returns the playbook of a catalog path; file names are refused, since they lead outside of the folder."""
    if not names_version(path) and path in plane.catalog.paths:
        return await asyncio.to_thread(plane.catalog.load, path, lenient=lenient)
    registered = plane.engine.runtime.registered
    if await registered.find(path) is not None:
        return await registered.load(path, lenient=lenient)
    raise ApiProblem(
        404,
        f"no playbook with the catalog path {path!r} (metadata.path) is registered (POST /api/catalog), nor in the "
        "folder that the service was started with, NOETL_PLAYBOOKS_PATH",
    )


@router.get("/{execution_id}", dependencies=[FOR_READERS])
async def get_execution(execution_id: ExecutionId, plane: ThePlane) -> Overview:
    """Returns status, steps, live counts of loops, and the state of the pool of workers."""
    return await full_overview(plane.engine.runtime, execution_id)


@router.get("/{execution_id}/events", dependencies=[FOR_READERS], response_model=EventPage)
async def get_events(
    execution_id: ExecutionId,
    plane: ThePlane,
    after: Annotated[Id, Query(description="only events with a larger id")] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> dict[str, Any]:
    """Returns events in the order of their ids; a page also ends at ``NOETL_SERVICE_PAGE_BYTES``."""
    log = plane.engine.runtime.log
    page = await _page(log.events(execution_id, after=after, page=min(limit + 1, SLICE)), plane, limit)
    if not page["events"] and await plane.handler.unknown_executions([execution_id]):
        raise ApiProblem(404, f"no execution {execution_id} in the event log")
    return page


@router.get("/{execution_id}/lifecycle", response_model=EventPage)
async def get_lifecycle(
    execution_id: ExecutionId,
    plane: ThePlane,
    sender: Anyone,
    after: Annotated[Id, Query(description="only events with a larger id")] = 0,
) -> dict[str, Any]:
    """Returns the events that the state is folded from, for workers that hold a command of the execution.

    A page ends at ``NOETL_SERVICE_PAGE_BYTES``.
    """
    if not await plane.may_read(sender, execution_id):
        raise ApiProblem(404, f"this worker holds no command of an execution {execution_id}")
    events = await plane.engine.runtime.log.lifecycle(execution_id)
    if not events:
        raise ApiProblem(404, f"no execution {execution_id} in the event log")
    return await _page(_each(event for event in events if event.event_id > after), plane, len(events))


async def _each(events: Iterable[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


async def _page(events: AsyncIterator[Event], plane: Plane, limit: int) -> dict[str, Any]:
    """Returns an ``EventPage`` of up to ``limit`` events, which ends earlier when it is large."""
    messages: list[dict[str, Any]] = []
    size, most = 0, plane.engine.runtime.settings.service_page_bytes
    async for event in events:
        if len(messages) == limit or size >= most:
            return {"events": messages, "more": True}
        messages.append(message_of(event))
        size += len(encode_json(messages[-1]))
    return {"events": messages, "more": False}


@router.post("/{execution_id}/cancel", dependencies=[FOR_OPERATORS])
async def cancel(execution_id: ExecutionId, plane: ThePlane, request: Cancel | None = None) -> Cancelled:
    """Cancels an execution: nothing more is issued."""
    reason = request.reason if request is not None else Cancel().reason
    return Cancelled(execution_id=str(execution_id), cancelled=await cancel_execution(plane, execution_id, reason))


@router.post("/{execution_id}/resume", status_code=202, dependencies=[FOR_OPERATORS])
async def resume(execution_id: ExecutionId, plane: ThePlane) -> Started:
    """Resumes an execution that failed or lost its process, as a Dagster run; finished work is not repeated."""
    await resume_execution(plane, execution_id)
    return Started(execution_id=str(execution_id))


async def cancel_execution(plane: Plane, execution_id: int, reason: str) -> bool:
    """Cancels an execution and its run; returns False if it had ended already."""
    done = await plane.engine.lifecycle.cancel(execution_id, reason)
    if done:
        state = await plane.engine.runtime.state(execution_id)
        await plane.launcher.cancelled(state.playbook, execution_id)
    return done


async def resume_execution(plane: Plane, execution_id: int) -> None:
    """Starts a run that continues an execution.

    Raises:
        ExecutionStateError: it is completed or cancelled, or a process drives it.
        ApiProblem: 503, the run did not start.
    """
    execution = await plane.engine.lifecycle.load_resumable(execution_id)
    try:
        await plane.launcher.launch(execution.playbook, execution_id, {}, resumed=True)
    except (OSError, LaunchError, NotDeployedError) as error:
        raise ApiProblem(503, f"the run of execution {execution_id} did not start: {error}") from error
