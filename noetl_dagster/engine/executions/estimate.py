"""Estimates the remaining time of an execution from its loops and an earlier execution of the playbook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg

from noetl_dagster.engine.executions.overview import Overview
from noetl_dagster.engine.executions.progress import Pace

# The newest completed execution of the same playbook, one with the same workload before others.
_EARLIER = """
WITH own AS (  -- from the log, since a new execution may not be projected yet
    SELECT context -> 'workload' AS workload, context ->> 'path' AS path
    FROM noetl.event WHERE execution_id = $1 AND event_type = 'playbook.initialized' LIMIT 1
), earlier AS (
    SELECT execution_id, execution.state -> 'workload' AS workload
    FROM noetl.execution JOIN noetl.catalog USING (catalog_id) JOIN own USING (path)
    WHERE status = 'COMPLETED' AND execution_id <> $1
    ORDER BY execution_id DESC LIMIT 20
)
SELECT execution_id FROM earlier, own ORDER BY earlier.workload = own.workload DESC, execution_id DESC LIMIT 1
"""
_STEPS = """
SELECT node_name AS step,
       min(created_at) FILTER (WHERE event_type = 'step.enter') AS began,
       max(created_at) FILTER (WHERE event_type = 'step.exit') AS ended
FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('step.enter', 'step.exit')
GROUP BY node_name
"""


@dataclass(frozen=True, slots=True)
class Past:
    """When the steps of an earlier execution began and ended, in seconds from its first step."""

    began: Mapping[str, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, step: str) -> float | None:
        """Returns the duration of a step, None if it did not run."""
        if step not in self.began or step not in self.ended:
            return None
        return self.ended[step] - self.began[step]

    @property
    def end(self) -> float:
        """Seconds from the first step to the last end."""
        return max(self.ended.values(), default=0.0)


async def past_of(pool: asyncpg.Pool, execution_id: int) -> Past:
    """Returns the earlier execution that this one is compared with, or an empty one."""
    earlier = await pool.fetchval(_EARLIER, execution_id)
    if earlier is None:
        return Past()
    rows = await pool.fetch(_STEPS, earlier)
    moments = [row["began"] for row in rows if row["began"] is not None]
    if not moments:
        return Past()
    first: datetime = min(moments)

    def since(name: str) -> dict[str, float]:
        return {row["step"]: (row[name] - first).total_seconds() for row in rows if row[name] is not None}

    return Past(since("began"), since("ended"))


class Estimate:
    """Seconds until an execution ends.

    Assumes that its loops continue together at their recent pace, and that later steps take as long and come
    in the same order as in the earlier execution; without one, later steps are unknown.
    """

    def __init__(self, past: Past) -> None:
        self._past = past
        self._pace = Pace()
        self._began: dict[str, float] = {}

    def remaining(self, overview: Overview, now: float) -> float | None:
        """Returns the seconds from ``now``, a time of any clock; None while unknown."""
        running = [step for step in overview.steps if step.status == "RUNNING"]
        loops = [step.loop for step in overview.steps if step.loop is not None]
        self._pace.see(sum(loop.done + loop.failed for loop in loops), now)
        for step in running:
            self._began.setdefault(step.step, now)
        estimates = []
        for step in running:
            if step.loop is None or not step.loop.total:
                usual = self._past.seconds(step.step)
                left = None if usual is None else max(0.0, usual - (now - self._began[step.step]))
                if step.loop is not None and not left:
                    return None
                estimates += [] if left is None else [left]
        if any(step.loop is not None and step.loop.total for step in running):
            left = self._pace.remaining(sum(loop.total for loop in loops))
            if left is None:
                return None
            estimates.append(left)
        if not estimates and not self._past.ended:
            return None
        return max(estimates, default=0.0) + self._ahead(overview)

    def _ahead(self, overview: Overview) -> float:
        """Returns the seconds that followed, in the earlier execution, the end of all steps that have begun by now."""
        begun = [self._past.ended[step.step] for step in overview.steps if step.step in self._past.ended]
        return max(0.0, self._past.end - max(begun)) if begun else self._past.end
