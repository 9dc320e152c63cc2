"""Executions by filters, the newest first, and how many of them are in each state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.state import STATUS_OF_END, ExecutionStatus

MOST_COUNTED = 10_000
"""Executions that are counted by state, the newest ones."""

QUERY_SECONDS = 5.0
"""Time for one query; filters that match little in a long log may need more."""

_LAST = 2**63 - 1

# The condition on the event type is that of the index uidx_event_resumed_epoch, by which executions are found.
_FILTERED = """
SELECT initialized.execution_id, initialized.node_name AS playbook, initialized.parent_execution_id,
       initialized.context -> 'partition' ->> 'key' AS partition, initialized.context ->> 'path' AS path,
       initialized.created_at AS started_at, ended.event_type AS ended, ended.created_at AS ended_at,
       CASE WHEN ended.event_type <> 'playbook.completed' THEN left(ended.error, 300) END AS error
FROM noetl.event initialized
LEFT JOIN LATERAL (
    SELECT event_type, created_at, error FROM noetl.event terminal
    WHERE terminal.execution_id = initialized.execution_id
      AND terminal.event_type IN
        ('playbook.completed', 'playbook.failed', 'execution.cancelled', 'execution.resumed')
    ORDER BY terminal.event_id DESC LIMIT 1
) ended ON true
WHERE initialized.event_type = 'playbook.initialized'
  AND initialized.execution_id >= $1 AND initialized.execution_id < $2
  AND ($3::text IS NULL OR initialized.node_name = $3 OR initialized.context ->> 'path' = $3)
  AND ($4::text IS NULL OR position(lower($4) IN lower((initialized.context -> 'workload')::text)) > 0)
  AND ($5::bigint IS NULL OR initialized.parent_execution_id = $5)
"""
_IN_STATE = """
  AND ($6::text IS NULL OR CASE ended.event_type WHEN 'playbook.completed' THEN 'COMPLETED'
       WHEN 'playbook.failed' THEN 'FAILED' WHEN 'execution.cancelled' THEN 'CANCELLED' ELSE 'RUNNING' END = $6)
"""
LISTED = f"{_FILTERED} {_IN_STATE} {{which}} ORDER BY initialized.execution_id DESC LIMIT $7"
_OF_PARTITION = """
  AND initialized.context ? 'partition' AND initialized.context -> 'partition' ->> 'key' = $8
"""
_THAT_MADE = """
  AND initialized.execution_id IN (
    SELECT execution_id FROM noetl.event
    WHERE event_type = 'step.exit' AND status = 'COMPLETED' AND meta ? 'asset' AND meta ->> 'asset' = ${place})
"""
COUNTED = f"""
SELECT ended, count(*) AS executions FROM ({_FILTERED} ORDER BY initialized.execution_id DESC LIMIT $6) newest
GROUP BY ended
"""


@dataclass(frozen=True, slots=True)
class ExecutionFilter:
    """Which executions are wanted; None: any.

    Attributes:
        playbook: name or catalog path of the playbook.
        status: ``RUNNING``, ``COMPLETED``, ``FAILED`` or ``CANCELLED``.
        since: those that started at this time or later.
        until: those that started before.
        workload: a text that occurs in the JSON of the workload, in any case.
        parent: the execution that started them.
        before: those with a smaller id.
        after: those with a larger id.
        partition: those of the partition with this key; of two dimensions ``2026-01-01|berlin``.
        asset: those that made a result of the asset with this key, its parts joined by slashes.
    """

    playbook: str | None = None
    status: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    workload: str | None = None
    parent: int | None = None
    before: int | None = None
    after: int = 0
    partition: str | None = None
    asset: str | None = None

    def _bounds(self) -> tuple[int, int]:
        first = 0 if self.since is None else snowflake_floor(self.since)
        last = _LAST if self.until is None else snowflake_floor(self.until)
        return max(first, self.after + 1), max(last, 0)


@dataclass(frozen=True, slots=True)
class ListedExecution:
    """An execution of the list."""

    execution_id: int
    playbook: str
    path: str
    partition: str | None
    parent: int | None
    status: str
    started_at: datetime
    ended_at: datetime | None
    error: str | None


async def list_executions(
    pool: asyncpg.Pool, wanted: ExecutionFilter, limit: int, *, seconds: float | None = QUERY_SECONDS
) -> list[ListedExecution]:
    """Returns executions, the newest first.

    Raises:
        TimeoutError: the filters match too little of a long log to be answered in so many seconds.
    """
    first, last = wanted._bounds()
    last = min(last, wanted.before if wanted.before is not None else _LAST)
    values = [first, last, wanted.playbook, wanted.workload, wanted.parent, wanted.status, limit]
    which = ""
    if wanted.partition is not None:
        values.append(wanted.partition)
        which = _OF_PARTITION
    if wanted.asset is not None:
        values.append(wanted.asset)
        which += _THAT_MADE.format(place=len(values))
    return [_listed(row) for row in await pool.fetch(LISTED.format(which=which), *values, timeout=seconds)]


async def count_executions(pool: asyncpg.Pool, wanted: ExecutionFilter) -> dict[str, int]:
    """Returns by state how many of the newest :data:`MOST_COUNTED` executions there are, whatever state is wanted.

    Raises:
        TimeoutError: as for :func:`list_executions`.
    """
    first, last = wanted._bounds()
    values = (first, last, wanted.playbook, wanted.workload, wanted.parent, MOST_COUNTED)
    counts: Counter[str] = Counter(dict.fromkeys(ExecutionStatus, 0))
    for row in await pool.fetch(COUNTED, *values, timeout=QUERY_SECONDS):
        counts[_status(row)] += row["executions"]
    return dict(counts)


def _status(row: Any) -> ExecutionStatus:
    return STATUS_OF_END.get(row["ended"], ExecutionStatus.RUNNING)


def _listed(row: Any) -> ListedExecution:
    status = _status(row)
    return ListedExecution(
        execution_id=row["execution_id"],
        playbook=row["playbook"] or "",
        path=row["path"] or row["playbook"] or "",
        partition=row["partition"],
        parent=row["parent_execution_id"],
        status=status,
        started_at=row["started_at"],
        ended_at=None if status is ExecutionStatus.RUNNING else row["ended_at"],
        error=row["error"],
    )
