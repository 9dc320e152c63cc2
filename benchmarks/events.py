"""The event log beside what it is built on: raw COPY, a raw insert, and status reads in a log of millions.

Every ratio comes from one run on one table: both sides write the same rows with the same indexes and take
turns. Run: ``python benchmarks/events.py [--batches 40] [--singles 300] [--events 10000000]``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster import embedded
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.projection import Projection, read_execution
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings

DATABASE = "noetl_bench_events"
BATCH = 500

# A log of many executions with one loop of a thousand items each, made by the server itself.
FILL = """
INSERT INTO noetl.event (execution_id, event_id, event_type, node_name, status, meta, result, current_index)
SELECT $1::bigint + (n / 4000) * 4194304, $1::bigint + n,
       (ARRAY['loop.item', 'command.issued', 'command.claimed', 'command.completed'])[1 + n % 4], 'work', 'x',
       jsonb_build_object('loop_id', 'L' || n / 4000, 'visit', 1, 'attempt', 1,
                          'command_id', n / 4000 || ':work:1:' || n / 4 % 1000 || ':1'),
       CASE WHEN n % 4 = 3 THEN '{"status": "ok", "data": {"n": 1}}'::jsonb END, n / 4 % 1000
FROM generate_series($2::bigint, $3::bigint - 1) AS n
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    measured: str
    goal: str
    met: bool


Action = Callable[[], Awaitable[object]]


async def race(ours: Action, raw: Action, rounds: int) -> tuple[float, float]:
    """Median seconds of two actions that take turns, so that both meet the same machine."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            await (ours, raw)[which]()
            times[which].append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


class Bench:
    """One database of its own, dropped in the end."""

    def __init__(self, pool: asyncpg.Pool[Any]) -> None:
        self.pool = pool
        self.ids = Snowflake(1)
        self.log = EventLog(pool, self.ids)

    def events(self, count: int) -> list[Event]:
        """The ends of ``count`` iterations of one loop, each with a small result."""
        execution_id = self.ids.next()
        return [
            Event(
                execution_id,
                self.ids.next(),
                EventType.COMMAND_COMPLETED,
                node_name="work",
                status="COMPLETED",
                meta={
                    "command_id": command_id(execution_id, "work", 1, index),
                    "visit": 1,
                    "attempt": 1,
                    "loop_id": str(execution_id),
                    "iter_index": index,
                },
                result={"status": "ok", "data": {"n": index, "square": index * index}},
                current_index=index,
                duration=0.01,
            )
            for index in range(count)
        ]

    async def appending(self, batches: int) -> Line:
        """Concurrent commands hand their ends to the buffer; raw: the same rows, ready made, by COPY."""
        buffer = EventBuffer(self.log, size=BATCH)

        async def ours() -> None:
            for event in ours_events.pop():
                await buffer.post([event])
            await buffer.flush()

        async def raw() -> None:
            rows = raw_rows.pop()
            async with self.pool.acquire() as connection:
                for start in range(0, len(rows), BATCH):
                    await connection.copy_records_to_table(
                        "event", schema_name="noetl", columns=COLUMNS, records=rows[start : start + BATCH]
                    )

        rounds, size = max(batches // 10, 3), 10 * BATCH
        ours_events = [self.events(size) for _ in range(rounds)]
        raw_rows = [[as_row(event) for event in self.events(size)] for _ in range(rounds)]
        mine, plain = await race(ours, raw, rounds)
        ratio = plain / mine
        measured = f"{size / mine:,.0f} events/s, raw COPY {size / plain:,.0f}/s: {ratio:.2f}"
        return Line(f"append in batches of {BATCH}", measured, ">= 0.60 of raw COPY", ratio >= 0.6)

    async def single(self, count: int) -> Line:
        """One awaited append after another; raw: asyncpg's own execute of one INSERT."""
        buffer = EventBuffer(self.log)
        statement = (
            f"INSERT INTO noetl.event ({', '.join(COLUMNS)}) "
            f"VALUES ({', '.join(f'${place}' for place in range(1, len(COLUMNS) + 1))})"
        )
        mine_events, raw_events = self.events(count), self.events(count)
        async with self.pool.acquire() as connection:

            async def ours() -> None:
                await buffer.append([mine_events.pop()])

            async def raw() -> None:
                await connection.execute(statement, *as_row(raw_events.pop()))

            mine, plain = await race(ours, raw, count)
        ratio = plain / mine
        measured = f"{mine * 1e6:,.0f} us, raw insert {plain * 1e6:,.0f} us: {ratio:.2f}"
        return Line("single awaited append", measured, ">= 0.80 of a raw insert", ratio >= 0.8)

    async def projecting(self, events: int) -> list[Line]:
        """Status reads while the log holds ``events`` events."""
        base = Snowflake(2).next()
        begin = time.perf_counter()
        for start in range(0, events, 250_000):
            await self.pool.execute(FILL, base, start, min(start + 250_000, events), timeout=600)
        await self._open_loops(base, events)
        await self.pool.execute("ANALYZE noetl.event", timeout=600)
        filled = time.perf_counter() - begin
        begin = time.perf_counter()
        taken = await Projection(self.pool).catch_up()
        projected = time.perf_counter() - begin
        wanted = [base + place * 4194304 for place in range(0, max(events // 4000, 1), max(events // 4000 // 200, 1))]
        times, floor = [], []
        for execution_id in wanted * 3:
            begin = time.perf_counter()
            found = await read_execution(self.pool, execution_id)
            times.append(time.perf_counter() - begin)
            assert found is not None
            begin = time.perf_counter()
            await self.pool.fetchval("SELECT 1")  # what the machine makes of nothing, at this moment
            floor.append(time.perf_counter() - begin)
        p50, p99 = statistics.median(times) * 1000, _p99(times)
        what = f"status with {events:,} events in the log"
        rate = f"{taken / 4 / projected:,.0f} events/s (the log was filled in {filled:,.0f} s)"
        return [
            Line(
                what,
                f"p50 {p50:.2f} ms, p99 {p99:.2f} ms (SELECT 1: p99 {_p99(floor):.2f} ms)",
                "p99 < 10 ms (goal 2 ms)",
                p99 < 10,
            ),
            Line("projecting", rate, "", True),
        ]

    async def _open_loops(self, base: int, events: int) -> None:
        opening = []
        for place in range(max(events // 4000, 1)):
            execution_id = base + place * 4194304
            loop = {
                "loop_id": f"L{place}",
                "visit": 1,
                "epoch": 1,
                "collection_size": 1000,
                "mode": "parallel",
            }
            for type_, name, meta in (
                (EventType.PLAYBOOK_INITIALIZED, "p", {"epoch": 1}),
                (EventType.STEP_ENTER, "work", {"visit": 1, "epoch": 1, "turn": 1}),
                (EventType.LOOP_STARTED, "work", loop),
            ):
                opening.append(Event(execution_id, self.ids.next(), type_, node_name=name, meta=meta))
        for start in range(0, len(opening), 5_000):
            await self.log.append(opening[start : start + 5_000])


def _p99(seconds: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    return statistics.quantiles(seconds, n=100)[98] * 1000


async def main(batches: int, singles: int, events: int) -> bool:
    services = embedded.ensure(Settings(), only=["postgres"])
    assert services.db_url is not None
    url = f"{services.db_url.rpartition('/')[0]}/{DATABASE}"
    server = await asyncpg.connect(services.db_url)
    await server.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
    await server.execute(f"CREATE DATABASE {DATABASE}")
    try:
        await apply_schema(url)
        pool = await open_pool(url, size=4)
        bench = Bench(pool)
        lines = [await bench.appending(batches), await bench.single(singles), *await bench.projecting(events)]
        await pool.close()
    finally:
        await server.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        await server.close()
    for line in lines:
        print(f"{'ok  ' if line.met else 'MISS'} {line.what:<42} {line.measured:<62} {line.goal}")
    return all(line.met for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=60, help=f"batches of {BATCH} events for each side")
    parser.add_argument("--singles", type=int, default=500, help="single appends for each side")
    parser.add_argument("--events", type=int, default=1_000_000, help="events in the log for the status reads")
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(main(arguments.batches, arguments.singles, arguments.events)) else 1)
