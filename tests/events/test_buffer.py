"""The buffer in front of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import Event, EventType
from tests.events.conftest import MakeEvent
from tests.waiting import PATIENCE_SECONDS, until


class Refusing(EventLog):
    """A log that refuses some events."""

    async def append(self, events: Sequence[Event], *, connection: Any = None, gated: bool = False) -> set[int]:
        if any(event.node_name == "bad" for event in events):
            raise ValueError("refused")
        return await super().append(events, connection=connection, gated=gated)


class Counting(EventLog):
    """A log that notes the sizes of batches, and whose first answers are lost."""

    sizes: list[int]
    lost = 0

    async def append(self, events: Sequence[Event], *, connection: Any = None, gated: bool = False) -> set[int]:
        inserted = await super().append(events, connection=connection, gated=gated)
        self.sizes.append(len(events))
        if len(self.sizes) <= self.lost:
            raise ConnectionResetError("the answer is lost")
        return inserted


@pytest.fixture
def counting(log: EventLog, ids: Snowflake) -> Counting:
    counting = Counting(log.pool, ids)
    counting.sizes = []
    return counting


async def test_a_batch_has_as_many_events_as_it_may(counting: Counting, event: MakeEvent, ids: Snowflake) -> None:
    buffer, execution_id = EventBuffer(counting, size=20, linger=600.0), ids.next()
    posted = [event(execution_id, EventType.WARNING) for _ in range(45)]
    for one in posted:
        await buffer.post([one])
    await buffer.flush()
    assert counting.sizes == [20, 20, 5]


async def test_a_log_is_read_page_by_page(log: EventLog, event: MakeEvent, ids: Snowflake) -> None:
    execution_id = ids.next()
    written = [event(execution_id, EventType.WARNING) for _ in range(5)]
    await log.append(written)
    assert [one.event_id async for one in log.events(execution_id, page=2)] == [one.event_id for one in written]


async def test_events_are_new_though_the_answer_of_their_commit_was_lost(
    counting: Counting, event: MakeEvent, ids: Snowflake
) -> None:
    counting.lost = 1
    one = event(ids.next(), EventType.WARNING)
    assert await EventBuffer(counting).append([one]) == {one.event_id}
    assert counting.sizes == [1, 1]


async def test_a_flush_does_not_wait_for_what_comes_after_it(log: EventLog, event: MakeEvent, ids: Snowflake) -> None:
    """Somebody who posts without end keeps the buffer busy for good."""
    buffer, execution_id = EventBuffer(log, size=20), ids.next()

    async def post() -> None:
        while True:
            await buffer.post([event(execution_id, EventType.WARNING)])
            await asyncio.sleep(0)

    posting = asyncio.create_task(post())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for _ in range(5):
                mine = event(execution_id, EventType.WARNING)
                await buffer.post([mine])
                await buffer.flush()
                assert await log.present([mine]) == {mine.event_id}
    finally:
        posting.cancel()
        with suppress(asyncio.CancelledError):
            await posting
        await buffer.flush()


async def test_a_flush_tells_of_posted_events_that_were_refused_once(
    log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    buffer, execution_id = EventBuffer(Refusing(log.pool, ids)), ids.next()
    good = event(execution_id, EventType.WARNING)
    await buffer.post([good])
    await buffer.post([event(execution_id, EventType.WARNING, node_name="bad")])
    with pytest.raises(ValueError, match="refused"):
        await buffer.flush(execution_id)
    await buffer.flush(execution_id)
    assert await log.present([good]) == {good.event_id}


async def test_what_was_posted_waits_for_company_until_somebody_hurries(
    log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    buffer, execution_id = EventBuffer(log, linger=600.0), ids.next()
    buffer.hurry()  # nothing waits: it is not remembered
    posted = [event(execution_id, EventType.WARNING) for _ in range(3)]
    for one in posted:
        await buffer.post([one])
    await asyncio.sleep(0.1)
    assert await log.present(posted) == set()
    buffer.hurry()
    await until(lambda: arrived(log, posted), "the events")


async def arrived(log: EventLog, events: Sequence[Event]) -> bool:
    return len(await log.present(events)) == len(events)


async def test_what_is_not_urgent_waits_and_may_be_withdrawn(log: EventLog, event: MakeEvent, ids: Snowflake) -> None:
    buffer, execution_id = EventBuffer(log, linger=600.0), ids.next()
    kept, withdrawn = (event(execution_id, EventType.WARNING) for _ in range(2))
    writing, other = buffer.begin([kept], urgent=False), buffer.begin([withdrawn], urgent=False)
    await asyncio.sleep(0.1)
    assert (writing.done(), other.done()) == (False, False)
    assert buffer.withdraw(other)
    buffer.hurry()
    assert await writing == {kept.event_id}
    assert not buffer.withdraw(writing), "it is in the log"
    assert await log.present([kept, withdrawn]) == {kept.event_id}


async def test_a_buffer_from_which_all_is_withdrawn_goes_on(log: EventLog, event: MakeEvent, ids: Snowflake) -> None:
    buffer, execution_id = EventBuffer(log, linger=0.01), ids.next()
    assert buffer.withdraw(buffer.begin([event(execution_id, EventType.WARNING)], urgent=False))
    await asyncio.sleep(0.05)
    later = event(execution_id, EventType.WARNING)
    assert await buffer.append([later]) == {later.event_id}
    await buffer.flush()
