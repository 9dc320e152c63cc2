"""Events of one execution in the order of their commits: none is missed, none is read twice."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from noetl_dagster.events import commit_order
from noetl_dagster.events.commit_order import (
    START,
    CommittedPage,
    Position,
    events_in_commit_order,
    follow,
    has_ended,
    position_of,
)
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings
from tests.waiting import until

from .conftest import MakeEvent, connections


async def read_all(
    pool: asyncpg.Pool[Any], execution_id: int, count: int, after: Position = START, limit: int = 5_000
) -> tuple[list[int], Position]:
    """Reads until ``count`` events have come; transactions of other databases may hold the horizon back a while."""
    found: list[int] = []
    async with asyncio.timeout(90):
        while True:
            page = await events_in_commit_order(pool, execution_id, after, limit=limit)
            assert len(page.events) <= limit
            assert [one.position for one in page.events] == sorted(one.position for one in page.events)
            assert after < page.position or not page.events
            found += [one.event.event_id for one in page.events]
            after = page.position
            if page.is_last and len(found) >= count:
                return found, after
            if page.is_last:
                await asyncio.sleep(0.02)


async def test_pages_have_every_event_of_the_execution_once(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for window, limit in ((5_000, 5_000), (5_000, 7), (10, 7), (3, 3)):
        monkeypatch.setattr(commit_order, "WINDOW", window)
        own, other = ids.next(), ids.next()
        made = []
        for count in (1, 9, 2, 30):
            events = [event(own, EventType.STATE_SET) for _ in range(count)]
            made += [one.event_id for one in events]
            await log.append(events)
            await log.append([event(other, EventType.STATE_SET) for _ in range(17)])
        found, position = await read_all(pool, own, len(made), limit=limit)
        assert found == made, (window, limit)
        await log.append([event(other, EventType.STATE_SET) for _ in range(40)])
        later = event(own, EventType.STATE_SET)
        await log.append([later])
        assert (await read_all(pool, own, 1, position, limit))[0] == [later.event_id]
        third = await position_of(pool, own, made[2])
        assert third is not None
        assert (await read_all(pool, own, len(made) - 2, third, limit))[0] == [*made[3:], later.event_id]


async def test_a_late_commit_of_an_early_event_is_neither_skipped_nor_overtaken(
    settings: Settings, pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    execution_id = ids.next()
    first, early, late = (event(execution_id, EventType.STATE_SET) for _ in range(3))
    await log.append([first])
    _, position = await read_all(pool, execution_id, 1)
    async with connections(settings, 1) as [writer]:
        async with writer.transaction():
            await log.append([early], connection=writer)
            await log.append([late])
            page = await events_in_commit_order(pool, execution_id, position)
            assert (page.events, page.is_last) == ([], True)
        assert (await read_all(pool, execution_id, 2, page.position))[0] == [early.event_id, late.event_id]


async def test_an_execution_has_ended_until_it_is_resumed(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    execution_id = ids.next()
    position = START
    for epoch, type_, ended in [
        (1, EventType.PLAYBOOK_INITIALIZED, False),
        (1, EventType.PLAYBOOK_FAILED, True),
        (2, EventType.EXECUTION_RESUMED, False),
        (2, EventType.STEP_ENTER, False),
        (2, EventType.PLAYBOOK_COMPLETED, True),
    ]:
        await log.append([event(execution_id, type_, meta={"epoch": epoch})])
        _, position = await read_all(pool, execution_id, 1, position)
        assert await has_ended(pool, execution_id, position) == ended


async def test_lost_connections_only_delay_a_follower(
    settings: Settings,
    pool: asyncpg.Pool[Any],
    log: EventLog,
    event: MakeEvent,
    ids: Snowflake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit_order, "AWAY_SECONDS", 0.05)
    execution_id = ids.next()
    assert settings.db_url is not None
    own = await open_pool(settings.db_url, size=2, application="follower")
    found: list[int] = []

    async def read() -> None:
        async for one in follow(own, execution_id):
            found.append(one.event_id)  # noqa: PERF401 - others look at it meanwhile

    reading = asyncio.create_task(read())
    made = []
    for type_ in (EventType.PLAYBOOK_INITIALIZED, *[EventType.STATE_SET] * 2, EventType.PLAYBOOK_COMPLETED):
        made.append(event(execution_id, type_, meta={"epoch": 1}))
        await log.append(made[-1:])
        await until(lambda: len(found) == len(made) or reading.done(), "the event")
        await pool.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'follower'")
    await asyncio.wait_for(reading, 90)
    assert found == [one.event_id for one in made]
    await own.close()


async def test_a_follower_from_an_event_on_gets_none_twice_while_an_older_transaction_runs(
    settings: Settings,
    pool: asyncpg.Pool[Any],
    log: EventLog,
    event: MakeEvent,
    ids: Snowflake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execution_id = ids.next()
    types = (EventType.PLAYBOOK_INITIALIZED, EventType.STATE_SET, EventType.PLAYBOOK_COMPLETED)
    events = [event(execution_id, type_, meta={"epoch": 1}) for type_ in types]
    pages: list[CommittedPage] = []

    async def noted(*arguments: Any) -> CommittedPage:
        pages.append(await events_in_commit_order(*arguments))
        return pages[-1]

    async def read() -> list[int]:
        return [one.event_id async for one in follow(pool, execution_id, second)]

    monkeypatch.setattr(commit_order, "events_in_commit_order", noted)
    async with connections(settings, 1) as [writer], writer.transaction():
        await writer.execute("SELECT pg_current_xact_id()")
        await log.append(events)
        second = await position_of(pool, execution_id, events[1].event_id) or START
        reading = asyncio.create_task(read())
        await until(lambda: bool(pages), "a page")
    assert pages[0].position < second
    assert await asyncio.wait_for(reading, 90) == [events[2].event_id]


@pytest.mark.parametrize("window", [5_000, 2])
async def test_transactions_are_in_the_order_of_their_numbers(
    pool: asyncpg.Pool[Any],
    log: EventLog,
    event: MakeEvent,
    ids: Snowflake,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    monkeypatch.setattr(commit_order, "WINDOW", window)
    execution_id = ids.next()
    events = [event(execution_id, EventType.STATE_SET) for _ in range(4)]
    await log.append(events)
    order = [one.event_id for one in (events[2], events[0], events[3], events[1])]
    move = "UPDATE noetl.event SET xact_id = $3::text::xid8 WHERE execution_id = $1 AND event_id = $2"
    await pool.executemany(move, [(execution_id, *one) for one in zip(order, ["9", "10", "99", "100"], strict=True)])
    assert (await read_all(pool, execution_id, 4, limit=1))[0] == order
    assert (await read_all(pool, execution_id, 2, Position(10, order[1])))[0] == order[2:]


def test_positions_are_read_as_they_are_written() -> None:
    assert Position.parse(str(Position(12, 34))) == Position(12, 34)
    with pytest.raises(ValueError, match="later"):
        Position.parse("later")
