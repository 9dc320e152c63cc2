"""Events that travel many in a message: what is wrong with one harms no other, and who is killed loses none."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Any

import asyncpg
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport import base
from noetl_dagster.events.transport.handler import EventHandler, Intake
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import encode_batch, encode_event, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, Drain, Ids, ended, hold
from tests.redelivery import redelivered_after
from tests.service.conftest import Start
from tests.service.conftest import start as start
from tests.waiting import until

LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
LETTERS = "SELECT payload, error, message_id FROM noetl.dead_letter ORDER BY dead_letter_id"


def unknown(_: int) -> bytes:
    return encode_event(ended(IDS.next(), 0))


def no_event(execution_id: int) -> bytes:
    return orjson.dumps({"execution_id": str(execution_id), "event_type": "command.completed"})


def refused(execution_id: int) -> bytes:
    """Well-formed, and yet the log refuses it: it holds no such number."""
    message = message_of(ended(execution_id, 199))
    message["payload"]["result"]["data"] = "the number"
    return orjson.dumps(message).replace(b'"the number"', b"1" + b"0" * 30)


def forbidden(execution_id: int) -> bytes:
    return orjson.dumps(message_of(ended(execution_id, 0)) | {"event_type": "playbook.completed"})


Poison = Callable[[int], bytes]


async def publish(client: NatsClient, names: NatsNames, execution_id: int, contents: list[bytes]) -> None:
    subject = names.event_subject("default", "w1", execution_id, "batch")
    await client.jetstream().publish(subject, encode_batch(contents))


@pytest.mark.parametrize(("poison", "place"), [(unknown, 0), (refused, 19)])
async def test_one_poisonous_event_harms_no_neighbour(
    client: NatsClient,
    names: NatsNames,
    ingestor: Ingestor,
    drain: Drain,
    execution_id: int,
    logged: Ids,
    pool: asyncpg.Pool,
    poison: Poison,
    place: int,
) -> None:
    good = [ended(execution_id, index) for index in range(60)]
    contents = [encode_event(event) for event in good]
    bad = poison(execution_id)
    await publish(client, names, execution_id, contents[:20])
    await publish(client, names, execution_id, [*contents[20 : 20 + place], bad, *contents[20 + place : 40]])
    await publish(client, names, execution_id, contents[40:])
    await drain(ingestor)
    assert await logged(execution_id) == {event.event_id for event in good}
    [letter] = await pool.fetch(LETTERS)
    assert json.loads(letter["payload"]) == json.loads(bad)
    assert letter["message_id"].endswith(f"/{place}")


async def test_several_poisonous_events_of_a_message_are_put_aside_each(
    client: NatsClient,
    names: NatsNames,
    ingestor: Ingestor,
    drain: Drain,
    execution_id: int,
    logged: Ids,
    pool: asyncpg.Pool,
) -> None:
    good = [ended(execution_id, index) for index in range(10)]
    bad = [poison(execution_id) for poison in (unknown, no_event, refused, forbidden)]
    mixed = [content for pair in zip(map(encode_event, good), bad, strict=False) for content in pair]
    await publish(client, names, execution_id, mixed + [encode_event(event) for event in good[4:]])
    await publish(client, names, execution_id, bad[:1])
    await drain(ingestor)
    assert await logged(execution_id) == {event.event_id for event in good}
    letters = await pool.fetch(LETTERS)
    assert sorted(row["message_id"].split("/")[1:] for row in letters) == [[], ["1"], ["3"], ["5"], ["7"]]


class Stumbling(EventHandler):
    """Ends as nobody foresaw, whenever an event is among those that it cannot bear."""

    unbearable: frozenset[int] = frozenset()

    async def take_events(
        self, events: Sequence[Event], pools: Collection[str] | None = None, *, connection: Any = None
    ) -> Intake:
        if self.unbearable & {event.event_id for event in events}:
            raise LookupError("a defect")
        return await super().take_events(events, pools, connection=connection)


async def test_a_defect_that_one_message_meets_harms_no_neighbour(
    client: NatsClient,
    names: NatsNames,
    log: EventLog,
    settings: Settings,
    drain: Drain,
    execution_id: int,
    logged: Ids,
    pool: asyncpg.Pool,
) -> None:
    """Nor is the message put aside: it comes again until the service is mended."""
    handler = Stumbling(log, lease_seconds=30)
    ingestor = Ingestor(client, handler, redelivery=(1.0, 0.05))
    await ingestor.open()
    events = [ended(execution_id, index) for index in range(60)]
    handler.unbearable = frozenset({events[25].event_id})
    for begin in (0, 20, 40):
        await publish(client, names, execution_id, [encode_event(one) for one in events[begin : begin + 20]])
    others = {event.event_id for event in events[:20] + events[40:]}

    async def taken() -> bool:
        await ingestor.drain(quiet_seconds=0.3, most_seconds=1.0)
        return await logged(execution_id) == others

    await until(taken, "the other messages")
    handler.unbearable = frozenset()
    await drain(ingestor)
    await ingestor.close()
    assert await logged(execution_id) == {event.event_id for event in events}
    assert not await pool.fetch(LETTERS)


async def test_a_letter_of_a_lost_stream_is_kept_beside_the_new_ones(
    client: NatsClient, names: NatsNames, handler: EventHandler, settings: Settings, pool: asyncpg.Pool
) -> None:
    """A stream that was made anew counts its messages from one again."""
    for content in (b"first", b"second"):
        ingestor = Ingestor(client, handler)
        await ingestor.open()
        await client.jetstream().publish(names.event_subject("default", "w1", 1, "batch"), content)
        await until_letters(pool, ingestor)
        await ingestor.close()
        await client.jetstream().delete_stream(names.event_stream)
    assert [row["payload"] for row in await pool.fetch(LETTERS)] == [b"first", b"second"]


async def until_letters(pool: asyncpg.Pool, ingestor: Ingestor) -> None:
    async def put_aside() -> bool:
        await ingestor.drain(quiet_seconds=0.05)
        return ingestor.total.dead_letters > 0

    await until(put_aside, "the message to be put aside")


class InProcess:
    """An ingestor that can be ended as a killed process ends: it says nothing to anybody any more."""

    @classmethod
    async def start(
        cls, settings: Settings, log: EventLog, *, batch: int = 100, handler: EventHandler | None = None
    ) -> InProcess:
        self = cls()
        self.client = await connect(settings, "ingestor")
        self.ingestor = Ingestor(self.client, handler or EventHandler(log, 30), batch=batch)
        await self.ingestor.open()
        self.running = asyncio.create_task(self.ingestor.run(asyncio.Event()))
        return self

    async def kill(self) -> None:
        assert self.client._transport is not None
        self.client._transport._io_writer.transport.abort()  # type: ignore[attr-defined]
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.client.close()


class WithoutAcknowledging(EventHandler):
    """Commits, and does not return."""

    async def take_events(
        self, events: Sequence[Event], pools: Collection[str] | None = None, *, connection: Any = None
    ) -> Intake:
        await super().take_events(events, pools, connection=connection)
        return await asyncio.Future()


async def test_an_ingestor_that_is_killed_while_it_waits_for_more_senders(
    settings: Settings,
    client: NatsClient,
    names: NatsNames,
    execution_id: int,
    log: EventLog,
    logged: Ids,
    drain: Drain,
) -> None:
    """It has committed one batch without acknowledging it, and holds another one until its pause is over."""
    await redelivered_after(settings, 1.0)
    events = [ended(execution_id, index) for index in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PAUSE_SECONDS", "MOST_PAUSE_SECONDS"):
            patch.setattr(base, name, 600.0)
        held = await InProcess.start(settings, log, batch=2, handler=WithoutAcknowledging(log, 30))
        for begin in range(0, 40, 10):
            await publish(client, names, execution_id, [encode_event(one) for one in events[begin : begin + 10]])

        async def waits() -> bool:
            return len(await logged(execution_id)) > 0 and len(held.ingestor._pull._waiting) > 0

        await until(waits, "a committed batch and one that waits")
        committed = len(await logged(execution_id))
        assert committed < len(events)
        await held.kill()
    successor = await InProcess.start(settings, log)
    successor.running.cancel()
    total = await drain(successor.ingestor)
    await successor.kill()
    assert (total.events, total.duplicates) == (len(events) - committed, committed)
    rows = [event.event_id async for event in log.events(execution_id) if event.event_type == "command.completed"]
    assert sorted(rows) == sorted(event.event_id for event in events)


@pytest.mark.parametrize(("count", "kills"), [(1_500, 3), pytest.param(60_000, 30, marks=LONG)])
async def test_ingestors_that_are_killed_lose_and_double_nothing(
    settings: Settings,
    start: Start,
    names: NatsNames,
    execution_id: int,
    log: EventLog,
    pool: asyncpg.Pool,
    count: int,
    kills: int,
) -> None:
    """Of two processes and two in this one, some are killed with batches in their hands; others take their places."""
    await hold(pool, execution_id, count)
    await redelivered_after(settings, 1.0)
    processes = [start(settings, "ingest", "--batch", "100") for _ in range(2)]
    inside = [await InProcess.start(settings, log) for _ in range(2)]
    for process in processes:
        await asyncio.to_thread(process.until_says, "taking worker events")
    client = await connect(settings, "publisher")
    transport = NatsTransport(client)
    transport.batches = True
    events = [ended(execution_id, index) for index in range(count)]
    sent = 0

    async def send() -> None:
        nonlocal sent
        for begin in range(0, count, 50):
            await transport.publish(events[begin : begin + 50])
            sent = begin + 50
            await asyncio.sleep(0.005)

    sending = asyncio.create_task(send())
    for kill in range(kills):
        await until(lambda kill=kill: sent >= (kill + 1) * count // (kills + 2), "the load")
        if kill % 2:
            process = processes.pop(0)
            process.popen.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.popen.wait)
            if kill + 2 < kills:
                processes.append(start(settings, "ingest", "--batch", "100"))
        else:
            await inside.pop(0).kill()
            inside.append(await InProcess.start(settings, log))
    await sending

    async def complete() -> bool:
        state = (await client.jetstream().stream_info(names.event_stream)).state
        return state.messages == 0

    await until(complete, "the stream to be empty")
    rows = await pool.fetch("SELECT event_id FROM noetl.event WHERE event_type = 'command.completed'")
    assert len(rows) == count
    assert {row["event_id"] for row in rows} == {event.event_id for event in events}
    assert not await pool.fetch(LETTERS)
    for one in inside:
        await one.kill()
    await client.close()
