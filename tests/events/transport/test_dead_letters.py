"""Dead letters are listed, and processed again: once, whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import asyncpg
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.dead_letters import NOT_HELD, PREVIEW_BYTES, DeadLetters, Reprocessed
from noetl_dagster.events.transport.handler import DirectTransport, EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import EventLimits, encode_event, message_of
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.process.redaction import SECRETS
from tests.events.transport.conftest import IDS, Drain, Ids, ended, hold
from tests.waiting import until

STORED = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def letters(handler: EventHandler, names: NatsNames) -> DeadLetters:
    return DeadLetters(handler, names, EventLimits())


async def put(letters: DeadLetters, names: NatsNames, content: bytes, name: str = "1", subject: str = "") -> int:
    """Puts a message aside, and returns the number of its letter."""
    subject = subject or names.event_subject("default", "w1", 1, "command.completed")
    pool, name = letters._pool, f"{name}@{STORED.isoformat()}"
    await pool.execute(queries.PUT_DEAD_LETTER, names.event_stream, subject, content, "it was early", 5, name)
    return int(await pool.fetchval("SELECT max(dead_letter_id) FROM noetl.dead_letter"))


async def test_a_message_that_came_too_early_is_stored_later(
    client: NatsClient,
    ingestor: Ingestor,
    drain: Drain,
    letters: DeadLetters,
    log: EventLog,
    logged: Ids,
) -> None:
    execution_id = IDS.next()
    event = ended(execution_id, 0)
    await NatsTransport(client).publish([event, ended(IDS.next(), 0)])
    await drain(ingestor)
    other, letter = await letters.newest(10)
    assert f"no execution {execution_id}" in letter.error
    assert f'"execution_id":"{execution_id}"' in letter.preview
    assert await letters.reprocess(letter.id) == Reprocessed(0, 0, f"no execution {execution_id} in the event log")
    await hold(log.pool, execution_id, 1)
    await log.append([Event(execution_id, IDS.next(), EventType.PLAYBOOK_INITIALIZED, meta={"epoch": 1})])
    assert await letters.reprocess(letter.id) == Reprocessed(1, 0)
    assert await logged(execution_id) == {event.event_id}
    assert await log.pool.fetchval("SELECT count(*) FROM noetl.queue WHERE execution_id = $1", execution_id) == 0
    assert await letters.reprocess(letter.id) is None
    assert [one.id for one in await letters.newest(10)] == [other.id]


REFUSED: list[tuple[Callable[[Event], bytes], str]] = [
    (lambda event: b"no json", "not an event"),
    (lambda event: encode_event(event).replace(b"command.completed", b"step.exit"), "may not emit"),
    (lambda event: encode_event(event).replace(b'"w1"', b'"w2"'), "sends an event of worker 'w2'"),
    (lambda event: encode_event(event).replace(b'"index":0}', b'"index":1' + b"0" * 30 + b"}"), "DataError"),
    (lambda event: encode_event(ended(event.execution_id, 500)), NOT_HELD),
    (lambda event: encode_event(ended(1, 0)), "no execution 1 in the event log"),
    (
        lambda event: orjson.dumps({"events": [message_of(event), message_of(ended(event.execution_id, 500))]}),
        NOT_HELD,
    ),
    (lambda event: orjson.dumps({"events": [message_of(event), {}]}), "execution_id: Field required"),
]


async def test_what_the_log_refuses_is_kept_with_the_reason(
    letters: DeadLetters, names: NatsNames, execution_id: int, logged: Ids
) -> None:
    for number, (content_of, reason) in enumerate(REFUSED):
        letter_id = await put(letters, names, content_of(ended(execution_id, 0)), str(number))
        done = await letters.reprocess(letter_id)
        assert done is not None, reason
        assert reason in (done.error or "")
        [kept, *_] = await letters.newest(10)
        assert (kept.error, kept.deliveries) == (done.error, 6)
    assert await logged(execution_id) == set()


async def test_what_the_log_has_is_no_dead_letter(
    letters: DeadLetters, names: NatsNames, handler: EventHandler, execution_id: int, logged: Ids
) -> None:
    events = [ended(execution_id, index) for index in range(3)]
    await DirectTransport(handler).publish(events[:2])
    content = orjson.dumps({"events": [message_of(event) for event in events]})
    letter_id = await put(letters, names, content)
    assert await letters.reprocess(letter_id) == Reprocessed(1, 2)
    assert await letters.count() == 0
    assert await logged(execution_id) == {event.event_id for event in events}


async def test_events_keep_the_time_at_which_they_were_sent(
    letters: DeadLetters, names: NatsNames, log: EventLog, execution_id: int
) -> None:
    event = ended(execution_id, 0, created_at=STORED)
    await letters.reprocess(await put(letters, names, encode_event(event)))
    [stored] = [one async for one in log.events(execution_id, after=event.event_id - 1)]
    assert stored == event


async def test_several_at_once_store_a_letter_once(
    letters: DeadLetters, names: NatsNames, execution_id: int, logged: Ids
) -> None:
    event = ended(execution_id, 0)
    letter_id = await put(letters, names, encode_event(event))
    done = await asyncio.gather(*(letters.reprocess(letter_id) for _ in range(8)))
    assert [one for one in done if one is not None] == [Reprocessed(1, 0)]
    assert await logged(execution_id) == {event.event_id}


async def test_a_process_that_is_killed_changes_nothing(
    letters: DeadLetters, names: NatsNames, pool: asyncpg.Pool, execution_id: int, logged: Ids
) -> None:
    event = ended(execution_id, 0)
    letter_id = await put(letters, names, encode_event(event))
    kill = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND query LIKE '%noetl.settle%'"
    )
    async with pool.acquire() as holder, holder.transaction():
        await holder.execute("SELECT FROM noetl.queue WHERE execution_id = $1 FOR UPDATE", execution_id)
        work = asyncio.create_task(letters.reprocess(letter_id))

        async def blocked() -> bool:
            return await pool.fetchval(kill) == 1

        await until(blocked, "the statement that waits for the queue")
        with pytest.raises((asyncpg.PostgresError, OSError, asyncpg.InterfaceError)):
            await work
    assert await logged(execution_id) == set()
    assert await letters.count() == 1
    assert await letters.reprocess(letter_id) == Reprocessed(1, 0)


async def test_letters_are_listed_in_pages_and_can_be_read(letters: DeadLetters, names: NatsNames) -> None:
    SECRETS.hide("nightingale-4711")
    texts = [b"\xff\x00\x1b[31mred\r\n\xe2\x80\xaeback", b"x" * 5_000, b"a nightingale-4711", "ä".encode()]
    ids = [await put(letters, names, content, str(number)) for number, content in enumerate(texts)]
    first = await letters.newest(3)
    rest = await letters.newest(3, before=first[-1].id)
    assert [one.id for one in (*first, *rest)] == ids[::-1]
    previews = ["ä", "a ***", "x" * PREVIEW_BYTES, "\ufffd\ufffd\ufffd[31mred\ufffd\ufffd\ufffdback"]
    assert [one.preview for one in (*first, *rest)] == previews
    assert [one.size for one in (*first, *rest)] == [len(content) for content in texts[::-1]]
    assert await letters.count() == 4
