"""Results of steps for Dagster: references, values, and executions that ended without a Dagster run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, Field

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.envelopes import OK
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.state import StepEnd
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.store import NewResult
from noetl_dagster.worker.execution import Execution


async def references_of(runtime: Runtime, ends: Sequence[tuple[int, StepEnd]]) -> list[ResultRef]:
    """Returns the references of the results of steps, each with the id of its execution.

    Small results in the log get references in the eventlog tier, all in one statement.
    """
    new = [
        NewResult(_in_log(end), execution_id, end.step, "result", tier=StoreTier.EVENTLOG)
        for execution_id, end in ends
        if end.envelope.get("ref") is None
    ]
    made = iter(await runtime.results.put_many(new) if new else ())
    references = []
    for _, end in ends:
        reference = end.envelope.get("ref")
        if reference is None:
            references.append(next(made))
        else:
            references.append(ResultRef.model_validate(reference))
    return references


def _in_log(end: StepEnd) -> Any:
    return end.envelope["data"] if "data" in end.envelope else end.envelope.get("results")


async def value_of(runtime: Runtime, envelope: Mapping[str, Any]) -> Any:
    """Returns a step's result, fetched if it is stored. A loop's is a list, with the envelopes of failed items."""
    reference = envelope.get("ref")
    if reference is not None:
        return await runtime.results.get(reference)
    if "results" in envelope and "data" not in envelope:
        items = envelope["results"]
        return [await value_of(runtime, item) if item.get("status") == OK else item for item in items]
    return envelope.get("data")


# Ends are read below the oldest running transaction: a slow one may still commit a smaller number.
ENDED = """
SELECT execution_id, event_id, xact_id::text AS xact_id, EXISTS (
    SELECT FROM noetl.event reported
    WHERE reported.execution_id = ended.execution_id AND reported.event_type = 'execution.reported'
      AND reported.meta ->> 'epoch' = ended.meta ->> 'epoch') AS is_reported
FROM noetl.event ended
WHERE event_type IN ('playbook.completed', 'playbook.failed', 'execution.cancelled') AND execution_id >= $3
  AND (xact_id, event_id) > (
      CASE WHEN $1::text::xid8 < pg_snapshot_xmax(pg_current_snapshot()) THEN $1::text::xid8  -- else of another server
           ELSE '0' END, $2::bigint)
  AND xact_id < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY ended.xact_id, event_id  -- the column, a number: 'xact_id' alone is the text above
LIMIT $4
"""

SECONDS_BACK = 7 * 86_400
"""Executions that started earlier are ignored."""


class EndPosition(BaseModel, frozen=True):
    """The position of a reader of ends."""

    xact_id: int = Field(0, ge=0, lt=2**64)
    event_id: int = Field(0, ge=0, lt=2**63)


async def ended_outside(
    runtime: Runtime, liveness: Liveness, position: EndPosition, *, limit: int = 100
) -> tuple[list[Execution], EndPosition]:
    """Returns the next executions that ended without a Dagster run and are not reported, and the position after them.

    Stops at an execution that a process still drives, since that process reports it.
    """
    floor = snowflake_floor(datetime.now(UTC) - timedelta(seconds=SECONDS_BACK))
    rows = await runtime.pool.fetch(ENDED, str(position.xact_id), position.event_id, floor, limit)
    executions = {}
    for row in rows:
        if not row["is_reported"]:
            execution = await runtime.load(row["execution_id"])
            if execution.state.run_id is None and not execution.state.is_running:
                if await liveness.is_driven(execution.id):
                    break
                executions[execution.id] = execution
        position = EndPosition(xact_id=int(row["xact_id"]), event_id=row["event_id"])
    return list(executions.values()), position
