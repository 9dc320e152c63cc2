"""Worker events over NATS: how soon they are committed, and how many a second, beside what it is built on.

The raw sides run in the same process in turn: consuming the same messages from JetStream with every
acknowledgement and nothing else, and COPY of the same rows. Run: ``python benchmarks/transport.py [--events 40000]``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Collection, Sequence
from typing import Any

import asyncpg
from nats.aio.client import Client as NatsClient

from noetl_dagster import embedded
from noetl_dagster.engine.pool.ends import CommandEnds
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.transport.handler import EventHandler, Intake
from noetl_dagster.events.transport.ingest import BATCH, Ingestor, Pull
from noetl_dagster.events.transport.nats import NatsNames, connect, ensure_ingest_consumer, ensure_stream
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings

DATABASE = "noetl_bench_transport"
ITERATIONS = 1_000
EVENTS_EACH = 3
SPREAD_SECONDS = 3.0
WAKE_UPS = 500
HELD = """
INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, worker_id, claim_event_id,
                         context)
SELECT $1, meta ->> 'command_id', 0, 'fetch', 'http', 'leased', 'bench', 1, jsonb_build_object('meta', meta)
FROM unnest($2::jsonb[]) AS meta
"""
P99_GOAL, P99_SEED = 0.010, 0.050
RATE_GOAL = 20_000


class TimedIntake(EventHandler):
    """Notes when each event was committed."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(log, lease_seconds=300)
        self.committed: dict[int, float] = {}

    async def take_events(
        self, events: Sequence[Event], pools: Collection[str] | None = None, *, connection: Any = None
    ) -> Intake:
        taken = await super().take_events(events, pools, connection=connection)
        now = time.perf_counter()
        self.committed.update((event.event_id, now) for event in events)
        return taken


def completion(ids: Snowflake, execution_id: int, index: int) -> Event:
    return Event(
        execution_id=execution_id,
        event_id=ids.next(),
        event_type=EventType.COMMAND_COMPLETED,
        node_name="fetch",
        status="COMPLETED",
        duration=0.01,
        meta={
            "command_id": command_id(execution_id, "fetch", 1, index),
            "attempt": 1,
            "loop_id": "7",
            "iter_index": index,
        },
        parent_event_id=1,
        result={"status": "ok", "data": {"index": index, "rows": 10}},
        current_index=index,
        worker_id="bench",
    )


async def new_execution(log: EventLog, commands: int) -> int:
    """Makes an execution of whose commands a worker holds so many."""
    event = Event(log.ids.next(), log.ids.next(), EventType.PLAYBOOK_INITIALIZED, meta={"epoch": 1})
    await log.append([event])
    metas = [completion(log.ids, event.execution_id, index).meta for index in range(commands)]
    await log.pool.execute(HELD, event.execution_id, metas)
    return event.execution_id


async def delays(log: EventLog, settings: Settings, publisher: NatsClient, taker: NatsClient) -> list[float]:
    """Seconds from publish to commit of the events of 1,000 iterations at once."""
    handler = TimedIntake(log)
    ingestor = Ingestor(taker, handler)
    await ingestor.open()
    stop = asyncio.Event()
    running = asyncio.create_task(ingestor.run(stop))
    transport = NatsTransport(publisher)
    execution_id = await new_execution(log, ITERATIONS * EVENTS_EACH)
    published: dict[int, float] = {}

    async def iterate(number: int) -> None:
        for place in range(EVENTS_EACH):
            await asyncio.sleep(random.uniform(0, 2 * SPREAD_SECONDS / EVENTS_EACH))
            event = completion(log.ids, execution_id, number * EVENTS_EACH + place)
            published[event.event_id] = time.perf_counter()
            await transport.publish([event])

    await asyncio.gather(*(iterate(number) for number in range(ITERATIONS)))
    while len(handler.committed) < ITERATIONS * EVENTS_EACH:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stop.set()
    await running
    await ingestor.close()
    return sorted(handler.committed[name] - at for name, at in published.items())


async def wake_ups(log: EventLog, settings: Settings, publisher: NatsClient, taker: NatsClient) -> list[float]:
    """Seconds from the end that a worker publishes to the wake-up of the op that waits for it, one at a time."""
    assert settings.db_url is not None
    ingestor = Ingestor(taker, EventHandler(log, lease_seconds=300))
    await ingestor.open()
    stop = asyncio.Event()
    running = asyncio.create_task(ingestor.run(stop))
    ends = CommandEnds(log.pool, settings.db_url)
    await ends.open()
    transport = NatsTransport(publisher)
    execution_id = await new_execution(log, WAKE_UPS)
    waits = []
    for index in range(WAKE_UPS):
        event = completion(log.ids, execution_id, index)
        command = event.meta["command_id"]
        woken = ends.expect(execution_id, command)
        started = time.perf_counter()
        await transport.publish([event])
        await woken
        waits.append(time.perf_counter() - started)
    stop.set()
    await running
    await ingestor.close()
    await ends.close()
    return sorted(waits)


async def fill(log: EventLog, settings: Settings, client: NatsClient, count: int) -> list[Event]:
    """Publishes the completions of a new execution, which then wait in the stream."""
    execution_id = await new_execution(log, count)
    events = [completion(log.ids, execution_id, index) for index in range(count)]
    transport = NatsTransport(client)
    for start in range(0, count, 2_000):
        await transport.publish(events[start : start + 2_000])
    return events


async def ingested(log: EventLog, settings: Settings, client: NatsClient, count: int) -> float:
    """Events a second from the stream into the log."""
    await fill(log, settings, client, count)
    ingestor = Ingestor(client, EventHandler(log, 300))
    await ingestor.open()
    started = time.perf_counter()
    while ingestor.total.events < count:
        await ingestor.drain(quiet_seconds=0.01)
    rate = count / (time.perf_counter() - started)
    await ingestor.close()
    return rate


async def consumed(log: EventLog, settings: Settings, client: NatsClient, count: int) -> float:
    """Messages a second from the stream, acknowledged and thrown away."""
    await fill(log, settings, client, count)
    names = NatsNames(settings)
    pull = Pull(client, names.event_stream, names.ingest_consumer, ahead=2 * BATCH)
    await pull.open()
    started, taken = time.perf_counter(), 0
    while taken < count:
        messages = await pull.take(BATCH, 1.0)
        for message in messages:
            await message.ack()
        taken += len(messages)
    await client.flush()
    rate = count / (time.perf_counter() - started)
    await pull.close()
    return rate


async def copied(log: EventLog, count: int) -> float:
    """Rows a second by COPY into the same table, in batches of the same size."""
    execution_id = await new_execution(log, count)
    rows = [as_row(completion(log.ids, execution_id, index)) for index in range(count)]
    started = time.perf_counter()
    async with log.pool.acquire() as connection:
        for start in range(0, count, BATCH):
            await connection.copy_records_to_table(
                "event", schema_name="noetl", columns=COLUMNS, records=rows[start : start + BATCH]
            )
    return count / (time.perf_counter() - started)


async def own_database(settings: Settings) -> str:
    """A fresh database on the embedded server."""
    assert settings.db_url is not None
    server = settings.db_url.rpartition("/")[0]
    connection = await asyncpg.connect(f"{server}/postgres")
    await connection.execute(f'DROP DATABASE IF EXISTS "{DATABASE}" WITH (FORCE)')
    await connection.execute(f'CREATE DATABASE "{DATABASE}"')
    await connection.close()
    await apply_schema(f"{server}/{DATABASE}")
    return f"{server}/{DATABASE}"


async def main(count: int, rounds: int) -> None:
    settings = embedded.ensure(Settings(), only=["postgres", "nats"])
    settings = settings.model_copy(
        update={
            "db_url": await own_database(settings),
            "nats_namespace": "bench",
        }
    )
    assert settings.db_url is not None
    pool = await open_pool(settings.db_url, size=4)
    log = EventLog(pool, Snowflake(1))
    publisher, taker = await connect(settings, "bench publisher"), await connect(settings, "bench taker")
    stream = taker.jetstream()
    names = NatsNames(settings)
    await ensure_stream(stream, NatsNames(settings))
    await stream.purge_stream(names.event_stream)
    await ensure_ingest_consumer(stream, names)

    waits = await delays(log, settings, publisher, taker)
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    woken = await wake_ups(log, settings, publisher, taker)
    rates: dict[str, list[float]] = {"ingest": [], "consume": [], "copy": []}
    for _ in range(rounds):
        rates["ingest"].append(await ingested(log, settings, taker, count))
        rates["consume"].append(await consumed(log, settings, taker, count))
        rates["copy"].append(await copied(log, count))
    ingest, consume, copy = (statistics.median(rates[name]) for name in ("ingest", "consume", "copy"))

    def line(what: str, measured: str, goal: str, met: bool | None = None) -> None:
        print(f"{what:<58} {measured:>14}   {goal:<28} {'' if met is None else 'met' if met else 'missed'}")

    print(f"{ITERATIONS} iterations at once, {EVENTS_EACH} events each within {2 * SPREAD_SECONDS:g} s")
    line("publish to committed and visible, p50", f"{p50 * 1000:.1f} ms", "")
    line("publish to committed and visible, p99", f"{p99 * 1000:.1f} ms", "seed: below 50 ms", p99 < P99_SEED)
    line("", "", "goal: below 10 ms", p99 < P99_GOAL)
    line("a worker's end to the wake-up of the waiting op, p50", f"{woken[WAKE_UPS // 2] * 1000:.1f} ms", "")
    line(
        "a worker's end to the wake-up of the waiting op, p99",
        f"{woken[WAKE_UPS * 99 // 100] * 1000:.1f} ms",
        "",
    )
    print(f"{count} events waiting in the stream, median of {rounds}")
    line("from the stream into the log", f"{ingest:,.0f}/s", f"goal: {RATE_GOAL:,}/s", ingest >= RATE_GOAL)
    line("raw: consume and acknowledge only", f"{consume:,.0f}/s", f"ours is {ingest / consume:.0%} of it")
    line("raw: COPY of the same rows only", f"{copy:,.0f}/s", f"ours is {ingest / copy:.0%} of it")
    both = 1 / (1 / consume + 1 / copy)
    line("raw: one after the other", f"{both:,.0f}/s", f"ours is {ingest / both:.0%} of it")

    await stream.delete_stream(names.event_stream)
    await publisher.close()
    await taker.close()
    await pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.events, arguments.rounds))
