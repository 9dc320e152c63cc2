"""NATS and PostgreSQL go in the middle of batches, and come back; or nothing that wakes a worker arrives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.embedded import ServiceName
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool import connection
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.transport.capacity import announce_commands
from noetl_dagster.events.transport.nats import NatsClient, NatsNames, connect
from noetl_dagster.pool_worker.claimer import Claimer
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import control_plane
from tests.waiting import until
from tests.whole import Fan, warm

LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
SERVERS = ["postgres", "nats"]


def kill(settings: Settings, victim: ServiceName) -> None:
    pid = read_state(settings.home).services[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def start_again(settings: Settings) -> None:
    await asyncio.to_thread(embedded.ensure, Settings(home=settings.home), SERVERS)


@asynccontextmanager
async def pooled(settings: Settings, **changes: Any) -> AsyncIterator[tuple[Settings, Engine]]:
    """A control plane and two workers on servers that a test may kill."""
    assert settings.db_url is not None
    await apply_schema(settings.db_url)
    patient = settings.model_copy(
        update={"worker_heartbeat_seconds": 20.0, "command_heartbeat_timeout_seconds": 600.0, **changes}
    )
    async with control_plane(patient, EventTransport.NATS) as own:
        engine = await Engine.open(own)
        async with working(own, "w1", worker_slots=4), working(own, "w2", worker_slots=4):
            await warm(engine)
            yield own, engine
        await engine.close()


BROKEN = "asyncpg may give out a connection in the middle of an operation, at which the driver ends"


@pytest.mark.parametrize(
    ("victims", "items"),
    [
        ([ServiceName.NATS, ServiceName.POSTGRES], 300),
        pytest.param([ServiceName.NATS] * 10, 6_000, marks=LONG),
        pytest.param([ServiceName.POSTGRES] * 10, 6_000, marks=[*LONG, pytest.mark.xfail(reason=BROKEN, strict=False)]),
    ],
    ids=["each once", "nats", "postgres"],
)
async def test_a_server_that_is_killed_costs_nothing(
    own_services: Settings, tmp_path: Path, victims: list[ServiceName], items: int
) -> None:
    async with pooled(own_services) as (own, engine):
        fan = await Fan.start(engine, tmp_path, items)
        for number, victim in enumerate(victims):
            await fan.until_done((number + 1) * items // (len(victims) + 2))
            assert not fan.is_over, "it was to be killed in the middle"
            kill(own, victim)
            await asyncio.sleep(0.3)
            await start_again(own)
        await fan.is_whole()


async def test_workers_are_not_taken_for_gone_while_nats_is(own_services: Settings, tmp_path: Path) -> None:
    """Nobody is heard while the server is away: commands that run would be run again, until they had failed."""
    async with pooled(own_services, worker_heartbeat_seconds=0.5) as (own, engine):
        fan = await Fan.start(engine, tmp_path, 8, held=8)
        await until(lambda: len(fan.begun) == 8, "commands that run")
        kill(own, ServiceName.NATS)
        await asyncio.sleep(3.0)  # six reports: half of them would do
        await start_again(own)
        await asyncio.sleep(0.5)
        fan.go()
        await fan.is_whole()


async def test_streams_that_are_deleted_cost_nothing(settings: Settings, tmp_path: Path) -> None:
    """What was in the stream of events is gone with it, so it is deleted when nothing is in it but commands wait."""
    async with control_plane(settings, EventTransport.NATS) as own:
        engine = await Engine.open(own)
        async with working(own, "w1", worker_slots=4), working(own, "w2", worker_slots=4):
            await warm(engine)
            fan = await Fan.start(engine, tmp_path, 60, held=60)
            await until(lambda: len(fan.begun) == 8, "commands that run")
            client, names = await connect(own, "test"), NatsNames(own)
            await client.jetstream().delete_stream(names.event_stream)
            await client.close()
            fan.go()
            await fan.is_whole()
        await engine.close()


async def test_a_worker_that_hears_nothing_asks_by_itself(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Claimer, "wake", lambda self: None)
    own = settings.model_copy(update={"worker_heartbeat_seconds": 1.0})
    engine = await Engine.open(own)
    async with working(own, "deaf", worker_slots=4):
        await asyncio.sleep(0.2)  # it has asked at its start
        fan = await Fan.start(engine, tmp_path, 40)
        await fan.is_whole()
    await engine.close()


async def test_a_lost_announcement_is_repeated_by_the_next_sweep(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def announce(client: NatsClient, commands: int, pool: str, *targets: list[str]) -> None:
        if not targets:  # as the sweep does
            await announce_commands(client, commands, pool)

    monkeypatch.setattr(connection, "announce_commands", announce)
    engine = await Engine.open(settings.model_copy(update={"worker_heartbeat_seconds": 1.0}))
    async with working(settings.model_copy(update={"worker_heartbeat_seconds": 1000.0}), "w", worker_slots=4):
        await asyncio.sleep(0.2)
        fan = await Fan.start(engine, tmp_path, 40)
        await fan.is_whole()
    await engine.close()
