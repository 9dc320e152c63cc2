"""``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

import asyncio

import nats.errors
from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from noetl_dagster.events.connection import DATABASE_ERRORS
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.transport.queries import DEAD_LETTER_COUNT, QUEUE_DEPTH
from noetl_dagster.service.access import FOR_READERS
from noetl_dagster.service.metrics import CurrentMetrics, QueuedCommands
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem

router = APIRouter(tags=["health"])

ANSWER_SECONDS = 3.0


class HealthStatus(BaseModel):
    """``ok``; a process that is not ready answers with a problem document."""

    status: str = "ok"


@router.get("/health")
async def health() -> HealthStatus:
    """Reports that the process runs."""
    return HealthStatus()


@router.get("/ready", responses={503: RESPONSES[503]})
async def ready(plane: ThePlane) -> HealthStatus:
    """Reports whether PostgreSQL and NATS answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await plane.engine.runtime.pool.fetchval("SELECT 1")
            await plane.client.flush(timeout=2)
    except (*DATABASE_ERRORS, nats.errors.Error) as error:
        raise ApiProblem(503, f"not ready: {type(error).__name__}") from None
    return HealthStatus()


@router.get(
    "/metrics",
    dependencies=[FOR_READERS],
    response_class=PlainTextResponse,
    responses={401: RESPONSES[401], 403: RESPONSES[403], 503: RESPONSES[503]},
)
async def metrics(plane: ThePlane) -> PlainTextResponse:
    """Returns metrics in Prometheus' text format."""
    pool = plane.engine.runtime.pool
    now = CurrentMetrics(
        queue=[QueuedCommands(**row) for row in await pool.fetch(QUEUE_DEPTH)],
        dead_letters=await pool.fetchval(DEAD_LETTER_COUNT),
        lag=await ingest_lag(plane),
        workers=[worker.report for worker in plane.capacity.registry.workers.values() if not worker.lost],
        projection_lag=await Projection(pool).lag_seconds(),
    )
    text = await asyncio.to_thread(plane.metrics.text, now)  # takes 0.1 s if there are many steps
    return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def ingest_lag(plane: Plane) -> int | None:
    """Returns how many messages of workers in NATS are not in the log yet; None if NATS does not answer."""
    names = plane.client.names
    try:
        info = await plane.client.jetstream().consumer_info(
            names.event_stream, names.ingest_consumer, timeout=ANSWER_SECONDS
        )
    except (nats.errors.Error, OSError):
        return None
    return (info.num_pending or 0) + (info.num_ack_pending or 0)
