"""How the pool of workers does with the steps of an execution, from the queue and the latest claims in the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import asyncpg
from pydantic import BaseModel, ConfigDict

from noetl_dagster.events.transport.attendance import MISSED_REPORTS
from noetl_dagster.settings import DEFAULT_POOL

LATEST = 1_000
"""So many of a step's commands are looked at, and as many more as run now, however many there were."""

MOST_WAITING = 10_000
"""So many waiting commands of an execution are counted, and no more."""

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
_LATEST = """
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
        WHERE claimed.nth = 1 AND execution_id = $1 AND meta ->> 'command_id' = claimed.command_id
          AND meta ? 'command_id'
          AND event_type IN ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
        LIMIT 1
    ) ended ON true
    HAVING count(*) > 0
) figures
"""


class PoolView(BaseModel):
    """A step in the pool: its commands now, and seconds of its latest ones; None while there are none.

    ``waiting`` commands are counted to :data:`MOST_WAITING` in all steps together; those that a worker has claimed
    are ``running``. ``queue_*`` are from the queueing of a command to its claim, ``run_*`` how long commands ran.
    ``unattended`` is the pool that they wait for, where no worker of it reports.
    While the step runs, ``rate`` is how many of them a second ended lately.
    """

    model_config = ConfigDict(frozen=True)

    waiting: int = 0
    running: int = 0
    unattended: str | None = None
    rate: float | None = None
    queue_p50: float | None = None
    queue_p99: float | None = None
    run_p50: float | None = None
    run_p99: float | None = None


async def pool_views(pool: asyncpg.Pool, execution_id: int, steps: Sequence[str]) -> dict[str, PoolView]:
    """By step, how it does in the pool; steps that never were there are left out.

    Costs milliseconds, however long the log of the execution.
    """
    queued = {row["step"]: row for row in await pool.fetch(_QUEUED, execution_id, MOST_WAITING)}
    attended: set[str] = set()
    if any(row["waiting"] for row in queued.values()):
        attended = {row["pool"] for row in await pool.fetch(_ATTENDED)}
    most = [LATEST + (queued[step]["running"] if step in queued else 0) for step in steps]
    latest = {row["step"]: row for row in await pool.fetch(_LATEST, execution_id, list(steps), most)}
    found = {}
    for step in steps:
        counts = _counts(queued[step], attended) if step in queued else {}
        if step in latest:
            found[step] = PoolView(**counts, **_figures(latest[step]))
        elif counts:
            found[step] = PoolView(**counts)
    return found


def _counts(row: Mapping[str, Any], attended: Collection[str]) -> dict[str, Any]:
    lonely = row["waiting"] and row["pool"] not in attended
    return {
        "waiting": row["waiting"],
        "running": row["running"],
        "unattended": row["pool"] if lonely else None,
    }


def _figures(row: Mapping[str, Any]) -> dict[str, float | None]:
    # the first end begins the time in which the others came
    others, seconds = row["counted"] - 1, row["seconds"]
    found: dict[str, float | None] = {"rate": others / seconds if others > 0 and seconds > 0 else None}
    for name in ("queue", "run"):
        for share, value in zip(("p50", "p99"), row[name] or (), strict=False):
            found[f"{name}_{share}"] = round(value, 4)
    return found
