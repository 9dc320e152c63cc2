"""Progress of an execution, from the log and the queue: rates of loops, notes of commands, figures of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
from pydantic import BaseModel

from noetl_dagster.events.queries import LOOP_RATES, end_of
from noetl_dagster.events.transport.queries import MISSED_REPORTS
from noetl_dagster.settings import DEFAULT_POOL

LATEST = 1_000
"""The number of a step's latest commands that are read, in addition to those that run now."""

MOST_WAITING = 10_000
"""The waiting commands of an execution are counted up to this number."""

# By step, the last note of its commands that run, or the page that one of its latest commands requests.
RUNNING_NOTES = f"""
SELECT DISTINCT ON (node_name) node_name, COALESCE(meta ->> 'note', 'page ' || (meta ->> 'page')) AS note
FROM (
    SELECT node_name, meta, event_id FROM noetl.event
    WHERE execution_id = $1 AND event_type = 'command.heartbeat' AND meta ? 'note'
    UNION ALL
    (SELECT node_name, meta, event_id FROM noetl.event
     WHERE execution_id = $1 AND event_type = 'command.issued' ORDER BY event_id DESC LIMIT 100)
) beat
WHERE meta ?| '{{note,page}}'
  AND NOT EXISTS (
      SELECT FROM noetl.event ended WHERE {end_of("$1", "beat.meta ->> 'command_id'")})
ORDER BY node_name, event_id DESC
"""

# By step, the worker that holds most of its commands while its reports are overdue.
_SILENT_WORKERS = """
SELECT DISTINCT ON (held.node_name) held.node_name, worker_id, count(*) AS commands,
       extract(epoch FROM now() - worker.heartbeat)::float8 AS seconds
FROM noetl.queue held JOIN noetl.runtime worker USING (worker_id)
WHERE held.execution_id = $1 AND held.status = 'leased'
  AND worker.heartbeat < now() - make_interval(secs => 1.5 * COALESCE((worker.capacity ->> 'interval')::float8, 15))
GROUP BY held.node_name, worker_id, worker.heartbeat
ORDER BY held.node_name, commands DESC, worker_id
"""


def per_second(rate: float) -> str:
    """Formats a rate: ``2300/s``, ``0.25/s``."""
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def duration(seconds: float) -> str:
    """Formats seconds: ``40 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def brief(seconds: float) -> str:
    """Formats times that may be short: ``4 ms``, ``1.3 s``, and from a minute on as :func:`duration`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


async def loop_rates(pool: asyncpg.Pool, execution_id: int) -> dict[str, float]:
    """Returns by loop id the iterations that ended per second lately, if any did.

    Lately is since the oldest of the execution's last events, or since the loop or a resumption began if that
    came later. While nothing ends the rate falls.
    """
    rows = await pool.fetch(LOOP_RATES, execution_id)
    return {row["loop_id"]: row["ended"] / row["seconds"] for row in rows if row["ended"] > 0 and row["seconds"] > 0}


async def running_notes(pool: asyncpg.Pool, execution_id: int) -> dict[str, str]:
    """Returns by step the latest progress note of a running command, or the silent worker that holds its commands."""
    rows = await pool.fetch(RUNNING_NOTES, execution_id)
    silent = await pool.fetch(_SILENT_WORKERS, execution_id)
    return {row["node_name"]: row["note"] for row in rows} | {
        row["node_name"]: f"worker {row['worker_id']} holds {row['commands']} commands, "
        f"and has not reported for {duration(row['seconds'])}"
        for row in silent
    }


# Commands that run are found by the index of those that have a worker.
_QUEUED = """
SELECT node_name AS step, count(*) FILTER (WHERE NOT claimed) AS waiting,
       count(*) FILTER (WHERE claimed) AS running, min(pool) FILTER (WHERE NOT claimed) AS pool
FROM (
    (SELECT node_name, pool, false AS claimed FROM noetl.queue WHERE execution_id = $1 AND status = 'queued' LIMIT $2)
    UNION ALL
    SELECT node_name, pool, true FROM noetl.queue
    WHERE execution_id = $1 AND status = 'leased' AND worker_id IS NOT NULL
) counted
GROUP BY node_name
"""

# Pools with a worker that takes commands and has not missed its reports.
_ATTENDED = f"""
SELECT DISTINCT COALESCE(capacity ->> 'pool', '{DEFAULT_POOL}') AS pool FROM noetl.runtime
WHERE kind = 'worker' AND status = 'ready'
  AND heartbeat > now() - make_interval(secs => {MISSED_REPORTS} * COALESCE((capacity ->> 'interval')::float8, 15))
"""

# By step ($2), of the latest claims, as many as $3 says: how long the commands waited, and how those ran that
# have ended. ``counted`` is how many of them ended since the latest start of the execution, the first of them
# ``seconds`` ago; a command that was claimed again ended once. The limits keep the planner from joining with all
# the ends of an execution.
_LATEST = f"""
WITH since AS (
    SELECT max(created_at) AS moment FROM noetl.event
    WHERE execution_id = $1 AND event_type IN ('playbook.initialized', 'execution.resumed')
)
SELECT wanted.step, figures.*
FROM unnest($2::text[], $3::int[]) AS wanted (step, most) CROSS JOIN since CROSS JOIN LATERAL (
    SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY claimed.waited) AS queue,
           percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ended.duration) AS run,
           count(*) FILTER (WHERE ended.created_at >= since.moment) AS counted,
           extract(epoch FROM clock_timestamp() - min(ended.created_at) FILTER (
               WHERE ended.created_at >= since.moment))::float8 AS seconds
    FROM (
        SELECT *, row_number() OVER (PARTITION BY command_id ORDER BY event_id DESC) AS nth
        FROM (
            SELECT event_id, meta ->> 'command_id' AS command_id, (meta ->> 'waited')::float8 AS waited
            FROM noetl.event
            WHERE execution_id = $1 AND node_name = wanted.step AND event_type = 'command.claimed'
              AND meta ? 'waited'
            ORDER BY event_id DESC LIMIT wanted.most
        ) latest
    ) claimed
    LEFT JOIN LATERAL (
        SELECT duration, created_at FROM noetl.event
        WHERE claimed.nth = 1 AND {end_of("$1", "claimed.command_id", "event")}
        LIMIT 1
    ) ended ON true
    HAVING count(*) > 0
) figures
"""


class PoolView(BaseModel, frozen=True):
    """The commands of a step in the pool of workers, with the durations of the latest ones in seconds.

    Attributes:
        waiting: commands in the queue, counted to :data:`MOST_WAITING` in all steps together.
        running: commands that a worker has claimed.
        unattended: name of the pool, if no worker of it reports.
        rate: commands that ended per second lately, while the step runs.
        queue_p50: median from the queueing of a command to its claim.
        queue_p99: the same, 99th percentile.
        run_p50: median duration of a command.
        run_p99: the same, 99th percentile.
    """

    waiting: int = 0
    running: int = 0
    unattended: str | None = None
    rate: float | None = None
    queue_p50: float | None = None
    queue_p99: float | None = None
    run_p50: float | None = None
    run_p99: float | None = None


async def pool_views(pool: asyncpg.Pool, execution_id: int, steps: Sequence[str]) -> dict[str, PoolView]:
    """Returns by step the figures of its commands in the pool; steps that never ran there are left out.

    Costs milliseconds, however long the log of the execution.
    """
    queued = {row["step"]: row for row in await pool.fetch(_QUEUED, execution_id, MOST_WAITING)}
    attended: set[str] = set()
    if any(row["waiting"] for row in queued.values()):
        attended = {row["pool"] for row in await pool.fetch(_ATTENDED)}
    most = [LATEST + (queued[step]["running"] if step in queued else 0) for step in steps]
    latest = {row["step"]: row for row in await pool.fetch(_LATEST, execution_id, list(steps), most)}
    views = {}
    for step in steps:
        figures: dict[str, Any] = {}
        if step in queued:
            row = queued[step]
            lonely = row["waiting"] and row["pool"] not in attended
            figures = {"waiting": row["waiting"], "running": row["running"]}
            figures["unattended"] = row["pool"] if lonely else None
        if step in latest:
            row = latest[step]
            others, seconds = row["counted"] - 1, row["seconds"]  # the first end begins the others' time
            figures["rate"] = others / seconds if others > 0 and seconds > 0 else None
            for name in ("queue", "run"):
                for share, value in zip(("p50", "p99"), row[name] or (), strict=False):
                    figures[f"{name}_{share}"] = round(value, 4)
        if figures:
            views[step] = PoolView(**figures)
    return views
