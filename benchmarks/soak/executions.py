"""The load: lanes that post one execution after another, and large loops one after another; each end is counted."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import asyncpg

from noetl_dagster.events.transport.wire import CLIENT_HEADER

MIX = {"pool": 14, "small": 2, "stream": 2, "cursor": 2}
"""Kinds of executions of the lanes, by weight."""

LOOPS = ("loop", "parallel")
LANES_OF_A_LOOP = 8
"""Iterations of a large loop that run at once."""

REACHED = 0.8
"""Share of its speed with which a loop is planned, so that the last one ends in time."""

POLL_SECONDS = 1.0

ENDED = """
SELECT DISTINCT ON (execution_id) execution_id, event_type, error FROM noetl.event
WHERE execution_id = ANY($1) AND event_type IN ('playbook.completed', 'playbook.failed', 'execution.cancelled')
ORDER BY execution_id, event_id DESC
"""
# Each command that was issued has one end, each iteration one index, and each loop one fan-in.
COUNTS = """
SELECT execution_id, count(*) AS events,
    count(DISTINCT meta ->> 'command_id') FILTER (WHERE event_type = 'command.issued') AS commands,
    count(*) FILTER (WHERE event_type IN ('command.completed', 'loop.shard.done')) AS ends,
    count(DISTINCT meta ->> 'command_id') FILTER (WHERE event_type IN ('command.completed', 'loop.shard.done'))
        AS ended,
    count(DISTINCT current_index) FILTER (
        WHERE event_type IN ('command.completed', 'loop.shard.done') AND node_name = 'each') AS items
FROM noetl.event WHERE execution_id = ANY($1) GROUP BY 1
"""


@dataclass(frozen=True, slots=True)
class Started:
    """An execution in progress."""

    kind: str
    items: int
    ended: asyncio.Future[None]


@dataclass(slots=True)
class Outcome:
    """What has been counted.

    Attributes:
        lost: commands without an end, and iterations that are missing.
        doubled: ends beyond the first of a command.
    """

    executions: Counter[str] = field(default_factory=Counter)
    events: int = 0
    items: int = 0
    lost: int = 0
    doubled: int = 0
    failed: list[str] = field(default_factory=list)
    largest: int = 0


class Load:
    """Posts executions to the API and counts the events of each one that has ended."""

    def __init__(self, url: str, pool: asyncpg.Pool[Any], rng: random.Random, *, pause: float) -> None:
        self._session = aiohttp.ClientSession(url, headers={CLIENT_HEADER: "soak"})
        self._pool = pool
        self._rng = rng
        self._pause = pause
        self._open: dict[int, Started] = {}
        self.outcome = Outcome()
        self.stopping = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        await self._session.close()

    async def lane(self) -> None:
        """Executions of random kinds, one after another."""
        while not self.stopping.is_set():
            [kind] = self._rng.choices(list(MIX), list(MIX.values()))
            workload = {"pause": self._pause * self._rng.uniform(0.5, 1.5)} if kind == "pool" else {}
            await self._run(kind, 20 if kind == "pool" else 0, workload)

    async def loops(self, items: int, rate: float, until: float) -> None:
        """Large loops, one after another, that end before ``until``, a monotonic time.

        Args:
            rate: iterations a second that a loop has at most.
        """
        number, speed = 0, rate
        while not self.stopping.is_set():
            began = time.monotonic()
            count = min(items, int((until - began) * speed * REACHED))
            if count < items / 10:
                return
            workload = {"n": count, "pause": LANES_OF_A_LOOP / rate}
            await self._run(LOOPS[number % len(LOOPS)], count, workload)
            speed = min(speed, count / (time.monotonic() - began))
            number += 1

    async def _run(self, kind: str, items: int, workload: dict[str, Any]) -> None:
        body = {"path": f"soak/{kind}", "workload": workload, "runner": "engine"}
        async with self._session.post("/api/executions/execute", json=body) as answer:
            answer.raise_for_status()
            execution_id = int((await answer.json())["execution_id"])
        self._open[execution_id] = Started(kind, items, asyncio.get_running_loop().create_future())
        await self._open[execution_id].ended

    async def follow(self) -> None:
        """Counts executions as they end, until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for row in await self._pool.fetch(ENDED, list(self._open)):
                if row["event_type"] != "playbook.completed":
                    kind = self._open[row["execution_id"]].kind
                    self.outcome.failed.append(f"{kind} {row['execution_id']}: {row['event_type']}, {row['error']}")
                    print(self.outcome.failed[-1], flush=True)
                await self._count(row["execution_id"])

    async def _count(self, execution_id: int) -> None:
        started, outcome = self._open.pop(execution_id), self.outcome
        counted = await self._pool.fetchrow(COUNTS, [execution_id], timeout=600)
        outcome.executions[started.kind] += 1
        outcome.events += counted["events"]
        outcome.items += counted["items"]
        outcome.lost += counted["commands"] - counted["ended"] + max(started.items - counted["items"], 0)
        outcome.doubled += counted["ends"] - counted["ended"]
        outcome.largest = max(outcome.largest, started.items)
        started.ended.set_result(None)

    def unfinished(self) -> Counter[str]:
        """Returns the kinds of executions that have not ended."""
        return Counter(one.kind for one in self._open.values())
