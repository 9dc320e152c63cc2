"""Executions that completed without a Dagster run, in the order in which their ends were committed."""

from __future__ import annotations

import time

from pydantic import BaseModel, ConfigDict

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.worker.execution import Execution

# Ends are read below the oldest running transaction: a slow one may still commit a smaller number.
COMPLETED = """
SELECT execution_id, event_id, xact_id::text AS xact_id FROM noetl.event
WHERE event_type = 'playbook.completed' AND execution_id >= $3
  AND (xact_id, event_id) > ($1::text::xid8, $2::bigint)
  AND xact_id < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY xact_id, event_id
LIMIT $4
"""

SECONDS_BACK = 7 * 86_400
"""Executions that started earlier are not looked at."""


class Position(BaseModel):
    """How far a reader of ends has come."""

    model_config = ConfigDict(frozen=True)

    xact_id: int = 0
    event_id: int = 0


async def finished_outside(
    runtime: Runtime, position: Position, *, limit: int = 100
) -> tuple[list[Execution], Position]:
    """The next executions that completed outside of Dagster, and the position after them."""
    floor = snowflake_floor(int((time.time() - SECONDS_BACK) * 1000))
    rows = await runtime.pool.fetch(COMPLETED, str(position.xact_id), position.event_id, floor, limit)
    found = []
    for row in rows:
        position = Position(xact_id=int(row["xact_id"]), event_id=row["event_id"])
        execution = await runtime.load(row["execution_id"])
        if execution.state.run_id is None:
            found.append(execution)
    return found, position
