"""NATS and PostgreSQL die in the middle of the load and come back: the log is what was published."""

from __future__ import annotations

import asyncio
import os
import signal

import asyncpg
import pytest

from noetl_dagster import embedded
from noetl_dagster.embedded import ServiceName
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.events.connection import DATABASE_AWAY, open_pool
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, ended, hold, started
from tests.waiting import until

EVENTS = 6_000
BATCH = 100


async def committed(pool: asyncpg.Pool) -> int:
    """Ends in the log; none while the server is not there."""
    try:
        return int(await pool.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed'"))
    except DATABASE_AWAY:
        return 0


@pytest.mark.parametrize("victims", [[ServiceName.NATS], [ServiceName.POSTGRES]], ids=lambda names: names[0].value)
async def test_nothing_is_lost_nor_doubled(own_services: Settings, victims: list[ServiceName]) -> None:
    settings = own_services
    assert settings.db_url is not None
    await apply_schema(settings.db_url)
    pool = await open_pool(settings.db_url, size=4)
    log = EventLog(pool, IDS)
    first = started()
    await log.append([first])
    await hold(pool, first.execution_id, EVENTS)
    publisher, taker = await connect(settings, "publisher"), await connect(settings, "taker")
    ingestors = [Ingestor(taker, EventHandler(log, 30), batch=200) for _ in range(2)]
    for ingestor in ingestors:
        await ingestor.open()
    stop = asyncio.Event()
    taking = [asyncio.create_task(ingestor.run(stop)) for ingestor in ingestors]
    transport = NatsTransport(publisher)
    events = [ended(first.execution_id, index) for index in range(EVENTS)]

    sent, away = 0, asyncio.Event()

    async def publish() -> None:
        nonlocal sent
        for start in range(0, EVENTS, BATCH):
            if start == EVENTS // 2:
                await away.wait()  # the load lasts beyond the beginning of the outage
            await transport.publish(events[start : start + BATCH])
            sent = start + BATCH
            await asyncio.sleep(0.02)

    publishing = asyncio.create_task(publish())
    for victim in victims:
        await until(lambda: publishing.done() or sent >= EVENTS // 4, "the load")
        assert not publishing.done(), "the load must last beyond the outage"
        pid = read_state(settings.home).services[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        away.set()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(embedded.ensure, Settings(home=settings.home), ["postgres", "nats"])
    await publishing
    published = {event.event_id for event in events}

    async def complete() -> bool:
        return await committed(pool) >= EVENTS

    await until(complete)
    stop.set()
    await asyncio.gather(*taking)
    rows = await pool.fetch("SELECT event_id FROM noetl.event WHERE event_type = 'command.completed'")
    assert len(rows) == EVENTS
    assert {row["event_id"] for row in rows} == published
    assert await pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 0
    for client in (publisher, taker):
        await client.close()
    await pool.close()
