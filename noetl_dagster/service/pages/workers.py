"""``/workers``: who is connected, what runs where, what waits, and messages that could not be ingested."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import asyncpg
from fastapi import Path, Request
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from noetl_dagster.events.projection import Projection
from noetl_dagster.events.transport.queries import MISSED_REPORTS, no_worker
from noetl_dagster.events.transport.wire import Id
from noetl_dagster.service.health import ingest_lag
from noetl_dagster.service.pages.access import TheForm, TheViewer, Viewer, secure_headers
from noetl_dagster.service.pages.rendering import fragment, page, page_router
from noetl_dagster.service.plane import Plane, ThePlane

router = page_router()

MOST_WORKERS, MOST_RUNNING, MOST_POOLS = 500, 500, 50
"""Rows of each table."""

MOST_COUNTED = 5_000
"""Waiting commands that are counted of each pool."""

KEPT_SECONDS = 1.0
"""The tables are rendered at most once in this time, however many people look at them."""

# Workers that have reported within an hour, those that report now first.
WORKERS = f"""
SELECT worker_id, status, capacity, meta, extract(epoch FROM now() - heartbeat)::float8 AS silent
FROM noetl.runtime WHERE kind = 'worker' AND heartbeat > now() - interval '1 hour'
ORDER BY heartbeat DESC LIMIT {MOST_WORKERS + 1}
"""

# Commands that workers hold, by worker, and since when; expired: no heartbeat arrives.
RUNNING = f"""
SELECT queue.execution_id, queue.node_name AS step, queue.tool_kind, queue.pool, queue.worker_id, queue.attempts,
       (queue.context #>> '{{meta,iter_index}}')::bigint AS index, (queue.context #>> '{{meta,visit}}')::int AS visit,
       extract(epoch FROM clock_timestamp() - claimed.created_at)::float8 AS seconds,
       queue.lease_until < now() AS expired
FROM noetl.queue LEFT JOIN LATERAL (
    SELECT created_at FROM noetl.event
    WHERE event.execution_id = queue.execution_id AND event.event_id = queue.claim_event_id) claimed ON true
WHERE queue.worker_id IS NOT NULL AND queue.status = 'leased'
ORDER BY queue.worker_id LIMIT {MOST_RUNNING + 1}
"""

# By pool, how many commands wait, and the age of the one that has waited longest among those that are counted. The
# names of pools are found one after the other by index, and the commands of each in the order of claims.
WAITING = f"""
WITH RECURSIVE pools (pool, number) AS (
    (SELECT pool, 1 FROM noetl.queue WHERE status = 'queued' ORDER BY pool LIMIT 1)
    UNION ALL
    SELECT (SELECT queue.pool FROM noetl.queue
            WHERE queue.status = 'queued' AND queue.pool > pools.pool ORDER BY queue.pool LIMIT 1), number + 1
    FROM pools WHERE pools.pool IS NOT NULL AND number < {MOST_POOLS}
)
SELECT pools.pool, waiting.commands, waiting.executions, waiting.oldest, waiting.later FROM pools
CROSS JOIN LATERAL (
    SELECT count(*) AS commands, count(DISTINCT execution_id) AS executions,
           count(*) FILTER (WHERE available_at > now()) AS later,
           GREATEST(extract(epoch FROM now() - min(available_at)), 0)::float8 AS oldest
    FROM (SELECT execution_id, available_at FROM noetl.queue
          WHERE queue.status = 'queued' AND queue.pool = pools.pool
          ORDER BY priority DESC, turn, event_id LIMIT {MOST_COUNTED}) AS first
) waiting
WHERE pools.pool IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class ShownWorker:
    """A worker and its latest report.

    Attributes:
        status: ``ready``, ``draining``, ``stopped``, or ``lost``: it has missed several reports.
        kinds: free slots by tool kind, for kinds with fewer slots than the worker.
        silent: seconds since the report.
        about: its host, transport and version.
    """

    worker_id: str
    pool: str
    status: str
    slots: int
    available: int
    active: int
    kinds: dict[str, int]
    silent: float
    about: dict[str, str]

    @property
    def is_connected(self) -> bool:
        """Reports whether it takes or runs commands."""
        return self.status in ("ready", "draining")


@dataclass(frozen=True, slots=True)
class PoolQueue:
    """Commands of a pool that wait, at most :data:`MOST_COUNTED`; ``later`` of them wait for a delay to pass."""

    pool: str
    commands: int
    executions: int
    oldest: float | None
    later: int
    workers: int
    slots: int
    free: int

    @property
    def is_capped(self) -> bool:
        """Reports whether there may be more."""
        return self.commands >= MOST_COUNTED

    @property
    def warning(self) -> str:
        """What must be done before its commands can run; empty if nothing must."""
        return no_worker(self.pool) if self.commands and not self.workers else ""


@dataclass(frozen=True, slots=True)
class Workforce:
    """What the page shows.

    Attributes:
        running: the rows of :data:`RUNNING`.
        ingest_lag: messages of workers in NATS that are not in the log; None if NATS does not answer.
        projection_lag: seconds by which the overview of executions is behind the log.
    """

    workers: Sequence[ShownWorker]
    running: Sequence[asyncpg.Record]
    pools: Sequence[PoolQueue]
    ingest_lag: int | None
    projection_lag: float


async def read_workforce(plane: Plane) -> Workforce:
    """Reads workers, running and waiting commands, each in a bounded query."""
    pool = plane.engine.runtime.pool
    workers = workers_of(await pool.fetch(WORKERS))
    return Workforce(
        workers=workers,
        running=await pool.fetch(RUNNING),
        pools=queues_of(await pool.fetch(WAITING), workers),
        ingest_lag=await ingest_lag(plane),
        projection_lag=await Projection(pool).lag_seconds(),
    )


def workers_of(rows: Iterable[Mapping[str, Any]]) -> list[ShownWorker]:
    """Returns the workers of ``noetl.runtime``, the connected ones first."""
    return sorted(map(_stored, rows), key=lambda one: (not one.is_connected, one.pool, one.worker_id))


def _stored(row: Mapping[str, Any]) -> ShownWorker:
    capacity, silent = row["capacity"], max(row["silent"], 0.0)
    is_lost = silent > MISSED_REPORTS * float(capacity.get("interval", 15.0))
    return ShownWorker(
        worker_id=row["worker_id"],
        pool=str(capacity.get("pool", "")),
        status="lost" if is_lost and row["status"] != "stopped" else row["status"],
        slots=int(capacity.get("slots", 0)),
        available=int(capacity.get("available_slots", 0)),
        active=int(capacity.get("active_tasks", 0)),
        kinds=dict(capacity.get("tool_pools") or {}),
        silent=silent,
        about=_about(row["meta"]),
    )


def _about(meta: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(meta[name]) for name in ("host", "transport", "version") if meta.get(name)}


def queues_of(rows: Iterable[Mapping[str, Any]], workers: Iterable[ShownWorker]) -> list[PoolQueue]:
    """Returns the queue of each pool that has waiting commands or workers."""
    waiting = {row["pool"]: dict(row) for row in rows}
    connected = [one for one in workers if one.is_connected]
    queues = []
    for pool in sorted({*waiting, *(one.pool for one in connected)}):
        mine = [one for one in connected if one.pool == pool]
        queues.append(
            PoolQueue(
                **(waiting.get(pool) or {"pool": pool, "commands": 0, "executions": 0, "oldest": None, "later": 0}),
                workers=len(mine),
                slots=sum(one.slots for one in mine),
                free=sum(one.available for one in mine),
            )
        )
    return queues


@router.get("/workers")
async def workers(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows the workers, what they run, and what waits for them."""
    workforce = await _rendered(request, plane)
    letters = await dead_letters_section(request, plane, viewer)
    return page(request, "workers.html", viewer, workforce=workforce, dead_letters=letters)


@router.get("/workers/now")
async def workers_now(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Returns the tables alone, which open pages fetch every two seconds."""
    return HTMLResponse(await _rendered(request, plane), headers=secure_headers())


async def _rendered(request: Request, plane: Plane) -> Markup:
    latest: tuple[float, Markup] | None = getattr(request.app.state, "workforce", None)
    if latest is None or time.monotonic() - latest[0] > KEPT_SECONDS:
        workforce = await read_workforce(plane)
        latest = time.monotonic(), fragment("parts/workforce.html", **_limited(workforce))
        request.app.state.workforce = latest
    return latest[1]


def _limited(workforce: Workforce) -> dict[str, Any]:
    """Returns the names of the template: at most so many rows of each table."""
    return {
        "workers": workforce.workers[:MOST_WORKERS],
        "more_workers": len(workforce.workers) > MOST_WORKERS,
        "connected": sum(one.is_connected for one in workforce.workers),
        "running": workforce.running[:MOST_RUNNING],
        "more_running": len(workforce.running) > MOST_RUNNING,
        "pools": workforce.pools,
        "ingest_lag": workforce.ingest_lag,
        "projection_lag": workforce.projection_lag,
    }


SHOWN_LETTERS = 20
BEFORE, REPROCESSED = "letters_before", "reprocessed"
"""Parameters of ``/workers``: only letters with a smaller id; the letter whose reprocessing has just ended."""


async def dead_letters_section(request: Request, plane: Plane, viewer: Viewer) -> Markup:
    """Returns the section for a viewer; it contains forms, so viewers cannot share it."""
    letters = plane.dead_letters
    before, reprocessed = _number(request, BEFORE), _number(request, REPROCESSED)
    newest = await letters.newest(SHOWN_LETTERS + 1, before=before)
    return fragment(
        "parts/dead_letters.html",
        viewer=viewer,
        letters=newest[:SHOWN_LETTERS],
        older=newest[SHOWN_LETTERS - 1].id if len(newest) > SHOWN_LETTERS else None,
        number=await letters.count(),
        reprocessed=reprocessed,
        remaining=None if reprocessed is None else await letters.find(reprocessed),
    )


@router.post("/dead-letters/{letter_id}/reprocess")
async def reprocess(letter_id: Annotated[Id, Path()], plane: ThePlane, form: TheForm) -> Response:
    """Reprocesses a dead letter, and shows the outcome in the section."""
    await plane.dead_letters.reprocess(letter_id)
    return RedirectResponse(f"/workers?{REPROCESSED}={letter_id}#dead-letters", 303)


def _number(request: Request, name: str) -> int | None:
    """Returns a parameter that is the id of a letter, else None."""
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
