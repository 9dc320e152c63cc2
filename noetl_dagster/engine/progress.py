"""Live counts of an execution's loops, from the log."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from noetl_dagster.events.queries import LOOP_PROGRESS


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """One activation of a loop or fan-out. ``failed`` counts iterations that will not be tried again."""

    step: str
    loop_id: str
    total: int
    done: int
    failed: int
    fanout: bool

    @property
    def ended(self) -> int:
        return self.done + self.failed

    def __str__(self) -> str:
        share = f" ({100 * self.ended // self.total} %)" if self.total else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.step}: {self.ended} of {self.total}{share} done{failed}"


async def loop_progress(pool: asyncpg.Pool, execution_id: int) -> list[LoopProgress]:
    """Every loop of an execution in the order in which they started."""
    rows = await pool.fetch(LOOP_PROGRESS, execution_id)
    return [
        LoopProgress(
            step=row["node_name"],
            loop_id=row["loop_id"],
            total=row["total"],
            done=row["done"],
            failed=row["failed"],
            fanout=row["kind"] == "loop.fanout.started",
        )
        for row in rows
    ]
