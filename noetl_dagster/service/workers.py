"""``/api/workers`` and ``/api/results``."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated

import nats.errors
from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from noetl_dagster.events.queries import NEXT_NODE
from noetl_dagster.events.transport.capacity import WorkerReport, publish_report, put_worker
from noetl_dagster.events.transport.wire import Text
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.service.access import FOR_READERS, Anyone, Worker
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem
from noetl_dagster.service.tokens import Principal

router = APIRouter(prefix="/api", responses=RESPONSES)

Ref = Annotated[Text, Query(max_length=2_000, description="``noetl://execution/<id>/result/<step>/<ref id>``")]


class WorkerRegistration(BaseModel):
    """``node``: number from 0 to 1023 for the middle bits of the worker's snowflake identifiers."""

    node: int


class WorkerView(BaseModel):
    """A worker and its latest report.

    Attributes:
        report: the report.
        silent_seconds: seconds since the report.
        lost: the worker stopped, or missed several reports.
    """

    report: WorkerReport
    silent_seconds: float
    lost: bool


class WorkerListing(BaseModel):
    """The workers in the order of their names."""

    workers: list[WorkerView]


@router.post("/workers", tags=["workers"])
async def register_worker(report: WorkerReport, plane: ThePlane, sender: Worker) -> WorkerRegistration:
    """Registers a worker, or receives its capacity report if it has no NATS connection for it."""
    if (refusal := sender.refusal(report.worker_id, report.pool)) is not None:
        raise ApiProblem(403, refusal)
    if (other := await put_worker(plane.engine.runtime.pool, report)) is not None:
        raise ApiProblem(409, f"worker {report.worker_id} reports for pool {other}; stop it first, or use another id")
    plane.capacity.registry.heard(report)
    with contextlib.suppress(nats.errors.Error, OSError):  # for dispatchers; the next report follows soon
        await publish_report(plane.client, report)
    return WorkerRegistration(node=await plane.engine.runtime.pool.fetchval(NEXT_NODE))


@router.get("/workers", dependencies=[FOR_READERS], tags=["workers"])
async def list_workers(plane: ThePlane) -> WorkerListing:
    """Lists the current capacity of every worker that has reported since the service started."""
    now = time.monotonic()
    return WorkerListing(
        workers=[
            WorkerView(report=worker.report, silent_seconds=round(now - worker.heard, 3), lost=worker.lost)
            for _, worker in sorted(plane.capacity.registry.workers.items())
        ]
    )


@router.get("/results/resolve", tags=["results"])
async def resolve_result(ref: Ref, plane: ThePlane, sender: Anyone) -> ResultRef:
    """Returns the place, size, encoding and checksum of a stored result; workers get those of commands they hold."""
    return await _find(ref, plane, sender)


@router.get("/results/content", tags=["results"], response_class=StreamingResponse)
async def result_content(ref: Ref, plane: ThePlane, sender: Anyone) -> StreamingResponse:
    """Streams the decompressed bytes of a stored object, in constant memory; of the whole value if it has parts."""
    results = plane.engine.runtime.results
    reference = await _find(ref, plane, sender)
    if reference.kind is RefKind.DATASET:
        raise ApiProblem(409, f"{ref[:200]} is a {reference.kind}; resolve it and read its files")

    async def content() -> AsyncIterator[bytes]:
        async for chunk in results.stream(reference):
            yield bytes(chunk)

    return StreamingResponse(content(), media_type=await results.content_type(reference))


async def _find(ref: str, plane: Plane, sender: Principal) -> ResultRef:
    """Returns a stored result; for a worker it must be of an execution whose command it holds."""
    execution = re.match(r"noetl://execution/(\d{1,19})/", ref)
    number = -1 if execution is None else min(int(execution[1]), 2**63 - 1)
    if not await plane.may_read(sender, number):
        raise ApiProblem(404, f"{ref[:200]}: no such result of an execution whose command this worker holds")
    return await plane.engine.runtime.results.find(ref)
