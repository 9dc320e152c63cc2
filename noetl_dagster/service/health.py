"""``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats.errors
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.service.access import FOR_READERS
from noetl_dagster.service.metrics import Exposition, Histogram
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import RESPONSES, Problem
from noetl_dagster.transport.capacity import WorkerReport
from noetl_dagster.transport.nats.names import Names
from noetl_dagster.transport.queries import DEAD_LETTER_COUNT, QUEUE_DEPTH

router = APIRouter(tags=["health"])

ANSWER_SECONDS = 3.0
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    status: str = "ok"


@router.get("/health")
async def health() -> Health:
    """The process lives."""
    return Health()


@router.get("/ready", responses={503: RESPONSES[503]})
async def ready(plane: ThePlane) -> Health:
    """PostgreSQL and NATS answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await plane.engine.runtime.pool.fetchval("SELECT 1")
            await plane.client.flush(timeout=2)
    except (*DATABASE_AWAY, nats.errors.Error) as error:
        raise Problem(503, f"not ready: {type(error).__name__}") from None
    return Health()


@router.get(
    "/metrics",
    dependencies=[FOR_READERS],
    response_class=PlainTextResponse,
    responses={401: RESPONSES[401], 403: RESPONSES[403], 503: RESPONSES[503]},
)
async def metrics(plane: ThePlane) -> PlainTextResponse:
    """Prometheus' text format."""
    scrape = Exposition()
    depth = await plane.engine.runtime.pool.fetchrow(QUEUE_DEPTH)
    letters = await plane.engine.runtime.pool.fetchval(DEAD_LETTER_COUNT)
    scrape.add("noetl_queue_depth", "gauge", "Commands that wait for a worker", depth["queued"])
    scrape.add("noetl_queue_active", "gauge", "Commands that workers have claimed", depth["active"])
    scrape.add("noetl_dead_letters", "gauge", "Messages put aside in noetl.dead_letter", letters)
    lag = await _lag(plane)
    if lag is not None:
        scrape.add("noetl_ingest_lag_messages", "gauge", "Worker events in NATS, not in the log yet", lag)
    total = plane.ingestor.total
    scrape.add(
        "noetl_ingested_events_total", "counter", "Events taken from NATS by this process", total.events
    )
    scrape.add(
        "noetl_ingest_duplicates_total", "counter", "Events that the log had already", total.duplicates
    )
    _latency(plane, scrape)
    _workers(plane, scrape)
    scrape.add(
        "noetl_http_requests_total",
        "counter",
        "Requests by method, route and status",
        [
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(plane.metrics.requests.items())
        ],
    )
    return PlainTextResponse(scrape.text(), media_type=PROMETHEUS)


def _latency(plane: Plane, scrape: Exposition) -> None:
    histogram: Histogram = plane.metrics.ingest
    for seconds in plane.ingestor.take_delays():
        histogram.observe(max(seconds, 0.0))
    scrape.histogram("noetl_ingest_latency_seconds", "From the arrival of events to their commit", histogram)


def _workers(plane: Plane, scrape: Exposition) -> None:
    living = [worker.report for worker in plane.capacity.registry.workers.values() if not worker.lost]
    scrape.add("noetl_workers", "gauge", "Workers that report", len(living))

    def add(name: str, meaning: str, value: Callable[[WorkerReport], float]) -> None:
        scrape.add(name, "gauge", meaning, [({"worker_id": one.worker_id}, value(one)) for one in living])

    add("noetl_worker_slots", "Commands that a worker runs at once", lambda one: one.slots)
    add("noetl_worker_active_tasks", "Commands that a worker runs now", lambda one: one.active_tasks)
    add(
        "noetl_worker_utilisation",
        "Share of a worker's slots in use",
        lambda one: one.active_tasks / one.slots if one.slots else 0.0,
    )


async def _lag(plane: Plane) -> int | None:
    names = Names.of(plane.settings)
    try:
        info = await plane.client.jetstream().consumer_info(
            names.event_stream, names.ingest_consumer, timeout=ANSWER_SECONDS
        )
    except (nats.errors.Error, OSError):
        return None
    return (info.num_pending or 0) + (info.num_ack_pending or 0)
