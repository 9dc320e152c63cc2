"""Events over NATS reach the log once each, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.errors import EventTooLargeError
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.handler import DirectTransport, EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsNames, ensure_stream
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import encode_event, message_of
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, Drain, Ids, ended, hold
from tests.waiting import PATIENCE_SECONDS


async def dead_letters(pool: asyncpg.Pool) -> list[Any]:
    return await pool.fetch("SELECT subject, payload, error, deliveries FROM noetl.dead_letter ORDER BY 1")


async def publish(client: NatsClient, names: NatsNames, content: bytes, execution_id: int = 1) -> None:
    await client.jetstream().publish(names.event_subject("default", "w1", execution_id, "command.completed"), content)


async def test_events_arrive_as_they_were_sent(
    client: NatsClient, names: NatsNames, ingestor: Ingestor, drain: Drain, log: EventLog, execution_id: int
) -> None:
    made = ended(execution_id, 3, created_at=datetime.now(UTC), context={"patches": [[["a"], 1]]})
    await NatsTransport(client).publish([made])
    report = await drain(ingestor)
    assert report.events == 1
    stored = [event async for event in log.events(execution_id, after=made.event_id - 1)]
    assert stored == [made]


async def test_the_streams_are_the_seeds(client: NatsClient, settings: Settings) -> None:
    plain = settings.model_copy(update={"nats_namespace": "noetl"})
    assert NatsNames(plain).event_stream == "NOETL_WORKER_EVENTS"
    assert NatsNames(plain).commands == "noetl.commands"
    assert await ensure_stream(client.jetstream(), NatsNames(settings)) == []
    config = (await client.jetstream().stream_info(NatsNames(settings).event_stream)).config
    assert (config.max_age, config.max_msg_size, config.num_replicas) == (3600, 65_536, 1)
    assert (config.retention, config.storage) == ("workqueue", "file")


async def test_a_stream_that_differs_is_reported_and_left_alone(client: NatsClient, settings: Settings) -> None:
    name = NatsNames(settings).event_stream
    stream = client.jetstream()
    await stream.add_stream(name=name, subjects=[f"{NatsNames(settings).event_prefix}.>"], max_age=60)
    differences = await ensure_stream(stream, NatsNames(settings))
    assert any("max_age is 60" in line and name in line for line in differences)
    assert any("retention is limits" in line for line in differences)
    assert (await stream.stream_info(name)).config.max_age == 60


async def test_duplicates_change_nothing(
    client: NatsClient, names: NatsNames, ingestor: Ingestor, drain: Drain, execution_id: int, logged: Ids
) -> None:
    events = [ended(execution_id, index) for index in range(50)]
    transport = NatsTransport(client)
    await transport.publish(events)
    await transport.publish(events)  # the stream knows their message ids
    for event in events[:10]:  # without message ids only the log can know
        await publish(client, names, encode_event(event), execution_id)
    report = await drain(ingestor)
    assert (report.events, report.duplicates) == (50, 10)
    await transport.publish([ended(execution_id, 0)])  # another end of a command that has ended
    report = await drain(ingestor)
    assert (report.events, report.duplicates, report.refused) == (50, 10, 1)
    assert await logged(execution_id) == {event.event_id for event in events}


async def test_order_does_not_matter(
    client: NatsClient, names: NatsNames, ingestor: Ingestor, drain: Drain, execution_id: int, logged: Ids
) -> None:
    end = ended(execution_id, 0)
    late = ended(execution_id, 0, event_type=EventType.COMMAND_HEARTBEAT, result=None)
    transport = NatsTransport(client)
    chunk = ended(execution_id, 0, event_type=EventType.CALL_PARTIAL)
    chunk.meta |= {"chunk_index": 0, "has_more": False, "row_count": 1}
    await transport.publish([late])
    await transport.publish([end])
    await drain(ingestor)
    await transport.publish([chunk])
    await transport.publish([ended(execution_id, 0, event_type=EventType.COMMAND_HEARTBEAT, result=None)])
    report = await drain(ingestor)
    assert (report.events, report.refused) == (3, 1)
    assert await logged(execution_id) == {late.event_id, end.event_id, chunk.event_id}


GARBAGE = [
    (b"\xff\x00 no json", "not an event"),
    (b"{}", "execution_id: Field required"),
    (b"[1, 2]", "not an event"),
    (b'{"execution_id": "-5", "event_id": "1", "event_type": "command.completed"}', "greater than"),
    (b'{"execution_id": "1e40", "event_id": "1", "event_type": "command.completed"}', "execution_id"),
    (b'{"execution_id": 1, "event_id": 1, "event_type": "playbook.completed"}', "may not emit"),
    (b'{"execution_id": 1, "event_id": 1, "event_type": "command.completed"}', "command_id is missing"),
    (
        b'{"execution_id": 1, "event_id": 1, "event_type": "command.completed",'
        b' "meta": {"command_id": "c"}, "payload": {"result": {"rows": []}}}',
        "a result has 'status'",
    ),
]


async def test_garbage_is_put_aside_and_does_not_hold_up_its_neighbours(
    client: NatsClient,
    names: NatsNames,
    ingestor: Ingestor,
    drain: Drain,
    execution_id: int,
    logged: Ids,
    pool: asyncpg.Pool,
) -> None:
    good = [ended(execution_id, index) for index, _ in enumerate(GARBAGE)]
    for event, (content, _) in zip(good, GARBAGE, strict=True):
        await publish(client, names, encode_event(event), execution_id)
        await publish(client, names, content)
    report = await drain(ingestor)
    assert (report.events, report.dead_letters) == (len(good), len(GARBAGE))
    assert await logged(execution_id) == {event.event_id for event in good}
    errors = {bytes(letter["payload"]): letter["error"] for letter in await dead_letters(pool)}
    assert errors.keys() == {content for content, _ in GARBAGE}
    assert [complaint for content, complaint in GARBAGE if complaint not in errors[content]] == []
    assert (await client.jetstream().stream_info(names.event_stream)).state.messages == 0


async def test_bytes_that_are_no_text_end_no_connection(
    settings: Settings,
    names: NatsNames,
    client: NatsClient,
    ingestor: Ingestor,
    drain: Drain,
    execution_id: int,
    logged: Ids,
    pool: asyncpg.Pool,
) -> None:
    server = urlsplit(settings.nats_url)
    login = {"user": server.username, "pass": server.password}
    raw = [(b"\xff\xfe", b""), (b"x", b"Nats-Msg-Id: \xff\xfe\r\n"), (b"x", b"no colon\r\n"), (b"x", b"\xff:\r\n")]
    for subject, header in raw:
        reader, writer = await asyncio.open_connection(server.hostname, server.port)
        await reader.readline()
        writer.write(b"CONNECT %s\r\n" % orjson.dumps({"verbose": False, "headers": True, **login}))
        head = b"NATS/1.0\r\n" + header + b"\r\n"
        place = names.event_prefix.encode() + b"." + subject
        writer.write(b"HPUB %s %d %d\r\n%s{}\r\nPING\r\n" % (place, len(head), len(head) + 2, head))
        assert await reader.readline() == b"PONG\r\n"
        writer.close()
    event = ended(execution_id, 0)
    await publish(client, names, encode_event(event), execution_id)
    await drain(ingestor)
    assert await logged(execution_id) == {event.event_id}
    assert [letter["payload"] for letter in await dead_letters(pool)] == [b"{}"] * len(raw)


async def test_an_unknown_execution_is_waited_for_and_then_put_aside(
    client: NatsClient,
    names: NatsNames,
    ingestor: Ingestor,
    drain: Drain,
    pool: asyncpg.Pool,
    log: EventLog,
    logged: Ids,
) -> None:
    early, lost = IDS.next(), IDS.next()
    await NatsTransport(client).publish([ended(early, 0), ended(lost, 0)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while ingestor.total.delayed < 2:
            await ingestor.drain(quiet_seconds=0.02)
    await hold(pool, early, 1)
    await log.append([Event(early, IDS.next(), EventType.PLAYBOOK_INITIALIZED, meta={"epoch": 1})])
    await drain(ingestor)
    assert len(await logged(early)) == 1
    [letter] = await dead_letters(pool)
    assert f"no execution {lost}" in letter["error"]
    assert letter["deliveries"] == 3


async def test_an_oversize_event_takes_another_way(
    client: NatsClient, names: NatsNames, handler: EventHandler, execution_id: int, logged: Ids
) -> None:
    event = ended(execution_id, 0, context={"patches": [[["text"], "x" * 70_000]]})
    with pytest.raises(EventTooLargeError, match="larger than the 65536 bytes"):
        await NatsTransport(client).publish([event])
    await NatsTransport(client, large=DirectTransport(handler)).publish([event])
    assert await logged(execution_id) == {event.event_id}


async def test_a_wrong_clock_is_corrected(
    client: NatsClient, names: NatsNames, ingestor: Ingestor, drain: Drain, log: EventLog, execution_id: int
) -> None:
    now = datetime.now(UTC)
    shifts = [timedelta(hours=5), timedelta(hours=-5), timedelta(seconds=3)]
    events = [ended(execution_id, index, created_at=now + shift) for index, shift in enumerate(shifts)]
    await NatsTransport(client).publish(events)
    await drain(ingestor)
    stored = {event.event_id: event async for event in log.events(execution_id)}
    *wrong, right = [stored[event.event_id] for event in events]
    assert right.created_at == now + shifts[-1]
    assert "clock_skew" not in right.meta
    for event, shift in zip(wrong, shifts, strict=False):
        assert event.created_at is not None
        assert abs(event.created_at - now) < timedelta(seconds=10)
        assert event.meta["clock_skew"] == pytest.approx(shift.total_seconds(), abs=10)


@pytest.mark.parametrize("count", [3, 120])
async def test_numbers_that_no_event_can_hold_end_no_ingestor(
    client: NatsClient,
    names: NatsNames,
    ingestor: Ingestor,
    drain: Drain,
    pool: asyncpg.Pool,
    execution_id: int,
    logged: Ids,
    count: int,
) -> None:
    """JSON has whole numbers of any length, our encoder has not. Few events and many go different ways."""
    made = [message_of(ended(execution_id, index)) for index in range(count)]
    guilty, refused = made[0], made[1]
    guilty["meta"]["large"] = refused["large"] = refused["event_type"] = 10**30
    content = json.dumps({"events": made}).encode()
    assert content.count(b"1" + b"0" * 30) == 3
    await client.jetstream().publish(names.event_subject("default", "w1", execution_id, "batch"), content)
    await drain(ingestor)
    assert await logged(execution_id) >= {int(one["event_id"]) for one in made[2:]}
    letters = await dead_letters(pool)
    assert len(letters) == 2
    assert all(str(10**30).encode() in letter["payload"] for letter in letters)


async def test_a_sender_in_a_transaction_is_told_that_its_command_has_ended(
    pool: asyncpg.Pool, handler: EventHandler, execution_id: int
) -> None:
    """So that it takes back what it wrote of a sink."""
    writer = DirectTransport(handler)
    first, late = ended(execution_id, 0), ended(execution_id, 0)
    async with pool.acquire() as connection, connection.transaction():
        assert await writer.append([first], connection=connection) == {first.event_id}
        assert await writer.append([late], connection=connection) == set()
