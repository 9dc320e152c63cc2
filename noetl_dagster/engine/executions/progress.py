"""How far an execution is, from the log: counts of its loops, and what its running commands say."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from noetl_dagster.events.queries import CHUNK_COUNTS, LOOP_PROGRESS, LOOP_RATES

PACE_SECONDS = 30.0

# By step, the last note of its commands that run.
RUNNING_NOTES = """
SELECT DISTINCT ON (beat.node_name) beat.node_name, beat.meta ->> 'note' AS note
FROM noetl.event beat
WHERE beat.execution_id = $1 AND beat.event_type = 'command.heartbeat' AND beat.meta ? 'note'
  AND NOT EXISTS (
      SELECT FROM noetl.event ended
      WHERE ended.execution_id = $1 AND ended.meta ->> 'command_id' = beat.meta ->> 'command_id'
        AND ended.event_type IN
            ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
        AND ended.meta ? 'command_id'
  )
ORDER BY beat.node_name, beat.event_id DESC
"""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """One activation of a loop or fan-out.

    Attributes:
        failed: iterations that will not be tried again.
        seconds: since it started.
    """

    step: str
    loop_id: str
    total: int
    done: int
    failed: int
    fanout: bool
    seconds: float = 0.0

    @property
    def ended(self) -> int:
        return self.done + self.failed

    @property
    def rate(self) -> float:
        """Iterations a second, from the start to now."""
        return self.ended / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        share = f" ({100 * self.ended // self.total} %)" if self.total else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.step}: {self.ended} of {self.total}{share} done{failed}"


class Pace:
    """How fast a loop goes now, from the counts that somebody sees every few seconds.

    Only the last half minute counts: what an earlier run did, and slow beginnings, say nothing of the rest.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, ended: int, now: float) -> None:
        """Takes a count of ended iterations at a time in seconds."""
        self._seen.append((now, ended))
        while len(self._seen) > 2 and now - self._seen[1][0] > PACE_SECONDS:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Iterations a second; 0 while two counts have not been seen."""
        if len(self._seen) < 2:
            return 0.0
        (begun, before), (now, ended) = self._seen[0], self._seen[-1]
        return max(0.0, (ended - before) / (now - begun)) if now > begun else 0.0

    def remaining(self, total: int) -> float | None:
        """Seconds until ``total`` iterations have ended, None while nobody can tell."""
        rate = self.rate
        return max(0, total - self._seen[-1][1]) / rate if rate else None

    def describe(self, total: int) -> str:
        """For example ``2300/s, 40 s left``; empty while nobody can tell. A total of 0 is one that nobody knows."""
        if not total:
            return per_second(self.rate) if self.rate else ""
        remaining = self.remaining(total)
        return "" if remaining is None else f"{per_second(self.rate)}, {duration(remaining)} left"


def per_second(rate: float) -> str:
    """For people: ``2300/s``, ``0.25/s``."""
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def duration(seconds: float) -> str:
    """For people: ``40 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def brief(seconds: float) -> str:
    """For people, of times that may be short: ``4 ms``, ``1.3 s``, and from a minute on as :func:`duration`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


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
            seconds=row["seconds"],
        )
        for row in rows
    ]


async def stream_progress(pool: asyncpg.Pool, execution_id: int, steps: Sequence[str]) -> str:
    """Where the chunks of a stream are: how many each of its steps has taken, and how many it has made.

    Args:
        steps: from the source on.
    """
    made = {row["node_name"]: row for row in await pool.fetch(CHUNK_COUNTS, execution_id)}
    took = {loop.step: loop for loop in await loop_progress(pool, execution_id)}
    said = []
    for step in steps:
        parts = []
        if step in took and step != steps[0]:
            parts.append(
                f"took {took[step].ended}" + (f", {took[step].failed} failed" * bool(took[step].failed))
            )
        if step in made:
            rows = "" if made[step]["rows"] is None else f" of {made[step]['rows']} rows"
            parts.append(f"made {made[step]['chunks']} chunks{rows}")
        if parts:
            said.append(f"{step}: {', '.join(parts)}")
    return "; ".join(said)


async def loop_rates(pool: asyncpg.Pool, execution_id: int) -> dict[str, float]:
    """By loop id, the iterations a second that have ended lately, where any have.

    Lately is since the oldest of the execution's last events, or since the loop or a resumption began if that
    came later. While nothing ends the rate falls.
    """
    rows = await pool.fetch(LOOP_RATES, execution_id)
    return {
        row["loop_id"]: row["ended"] / row["seconds"]
        for row in rows
        if row["ended"] > 0 and row["seconds"] > 0
    }


async def running_notes(pool: asyncpg.Pool, execution_id: int) -> dict[str, str]:
    """By step, what a command of it that runs has last said of its progress."""
    rows = await pool.fetch(RUNNING_NOTES, execution_id)
    return {row["node_name"]: row["note"] for row in rows}
