"""``ingest``, ``serve`` and ``worker`` as processes: they do their work, and SIGTERM loses none of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import httpx
import obstore
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.nats import NatsNames, connect, ensure_stream
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import CLIENT_HEADER, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.objects import minio_store
from tests.cli.conftest import Cli
from tests.conftest import aws_environment
from tests.events.transport.conftest import IDS, ended, hold, started
from tests.playbooks import playbook
from tests.service.conftest import Start
from tests.service.conftest import start as start
from tests.waiting import PATIENCE_SECONDS, until

MOST = 10_000
"""Commands that the worker w1 holds."""

ENDS = "SELECT event_id FROM noetl.event WHERE event_type = 'command.completed'"


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[NatsClient]:
    client = await connect(settings, "test")
    await ensure_stream(client.jetstream(), NatsNames(settings))
    yield client
    await client.close()


@pytest.fixture
async def execution_id(pool: asyncpg.Pool) -> int:
    event = started()
    await EventLog(pool, IDS).append([event])
    await hold(pool, event.execution_id, MOST)
    return event.execution_id


async def publish(client: NatsClient, settings: Settings, execution_id: int, count: int) -> list[Event]:
    events = [ended(execution_id, index) for index in range(count)]
    transport = NatsTransport(client)
    for at in range(0, count, 1_000):
        await transport.publish(events[at : at + 1_000])
    return events


async def logged(pool: asyncpg.Pool) -> list[int]:
    return sorted(row["event_id"] for row in await pool.fetch(ENDS))


async def test_ingest_once_takes_what_is_there(
    cli: Cli, client: NatsClient, settings: Settings, pool: asyncpg.Pool, execution_id: int
) -> None:
    events = await publish(client, settings, execution_id, 300)
    done = await asyncio.to_thread(cli, "ingest", "--once")
    assert done.returncode == 0, done.stderr
    assert "300 events in" in done.stdout
    assert await logged(pool) == sorted(event.event_id for event in events)
    state = (await client.jetstream().stream_info(NatsNames(settings).event_stream)).state
    assert state.messages == 0


async def test_ingest_ends_between_two_batches(
    start: Start, cli: Cli, client: NatsClient, settings: Settings, pool: asyncpg.Pool, execution_id: int
) -> None:
    service = start(settings, "ingest", "--batch", "50")
    await asyncio.to_thread(service.until_says, "taking worker events")
    events = await publish(client, settings, execution_id, MOST)
    await until(lambda: logged(pool), "the first events")
    assert await asyncio.to_thread(service.terminate) == 0, service.said()
    assert " events in " in service.said()
    done = await asyncio.to_thread(cli, "ingest", "--once")  # at once, for nothing is left half taken
    assert done.returncode == 0, done.stderr
    assert "known already" not in done.stdout
    assert await logged(pool) == sorted(event.event_id for event in events)


async def test_serve_takes_events_and_ends_with_a_signal(
    start: Start, client: NatsClient, settings: Settings, pool: asyncpg.Pool, execution_id: int
) -> None:
    # the reaper looks every second
    own = settings.model_copy(update={"command_heartbeat_seconds": 0.5, "command_heartbeat_timeout_seconds": 3.0})
    service = start(own, "serve", "--port", "0")
    url = (await asyncio.to_thread(service.until_says, r"HTTP API on (\S+)"))[1]
    assert url.startswith("http://127.0.0.1:")
    over_http = ended(execution_id, MOST - 1)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, headers={CLIENT_HEADER: "tests"}) as http:
        await until(lambda: answers(http), "the service to answer")
        response = await http.post("/api/events", json=message_of(over_http))
        assert response.json() == {"accepted": 1, "new": 1, "refused": []}
    over_nats = await publish(client, settings, execution_id, 20)
    expected = sorted(event.event_id for event in [over_http, *over_nats])

    async def all_there() -> bool:
        return await logged(pool) == expected

    await until(all_there, "the events that came over NATS")
    await pool.execute(
        "UPDATE noetl.queue SET lease_until = now() WHERE command_id = (SELECT max(command_id) FROM noetl.queue)"
    )
    await until(
        lambda: pool.fetchval("SELECT count(*) FROM noetl.queue WHERE status = 'queued'"),
        "an expired claim to be released",
    )
    await until(lambda: pool.fetchval("SELECT count(*) FROM noetl.execution"), "the projection")
    assert await asyncio.to_thread(service.terminate) == 0, service.said()


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).is_success
    except httpx.ConnectError:
        return False


GATED = """
workload: {gate: ""}
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: [1, 2, 3], iterator: n, mode: sequential}
    tool:
      kind: python
      input: {gate: "{{ gate }}", n: "{{ n }}"}
      code: |
        import pathlib, time
        while n == 1 and not pathlib.Path(gate).exists():
            time.sleep(0.02)
        result = n
"""
CLAIMS = "SELECT worker_id FROM noetl.event WHERE event_type = 'command.claimed' ORDER BY event_id"
DRAINING = "SELECT count(*) FROM noetl.runtime WHERE worker_id = 'first' AND status = 'draining'"


async def test_a_worker_ends_its_command_and_takes_no_other(
    start: Start, settings: Settings, pool: asyncpg.Pool, tmp_path: Path
) -> None:
    engine, gate = await Engine.open(settings), tmp_path / "gate"
    running = asyncio.create_task(engine.run(playbook(GATED), {"gate": str(gate)}))
    keeper = start(settings, "ingest")  # keeps the workers' reports in the database
    first = start(settings, "worker", "--id", "first")
    await until(lambda: pool.fetch(CLAIMS), "the first claim")
    await asyncio.to_thread(keeper.until_says, "taking worker events")
    first.popen.send_signal(signal.SIGTERM)
    await until(lambda: pool.fetchval(DRAINING), "the worker to drain")
    second = start(settings, "worker", "--id", "second")
    await asyncio.to_thread(second.until_says, "worker second")
    gate.touch()
    state = await asyncio.wait_for(running, PATIENCE_SECONDS)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await asyncio.to_thread(first.popen.wait, PATIENCE_SECONDS) == 0, first.said()
    assert [row["worker_id"] for row in await pool.fetch(CLAIMS)] == ["first", "second", "second"]
    assert await asyncio.to_thread(second.terminate) == 0, second.said()
    await engine.close()


async def test_services_look_at_the_buckets_when_they_start(settings: Settings, start: Start) -> None:
    aws = aws_environment(settings) | {"NOETL_S3_BUCKET": "nobodys"}

    process = start(settings, "serve", "--port", "0", **aws)

    process.until_says("s3 tier: no bucket nobodys; create it")
    process.until_says("HTTP API on")
    await obstore.list_with_delimiter_async(minio_store(settings))  # the bucket is there
    for command in ("worker", "ingest"):
        start(settings, command, **aws).until_says("s3 tier: no bucket nobodys; create it")
