"""Nothing twice: many real connections at a barrier, one winner (seed P0.1, P0.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import RefusedEventError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings

from .conftest import MakeEvent, connections

ROUNDS = pytest.mark.parametrize("rounds", [150, pytest.param(3_000, marks=pytest.mark.slow)])
LONG_ROUNDS = pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=pytest.mark.slow)])
COUNT = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = $2"


async def races(
    settings: Settings, racers: int, rounds: int
) -> AsyncIterator[tuple[list[asyncpg.Connection[Any]], asyncio.Barrier]]:
    """For each round the same connections, and a barrier at which all of them meet."""
    async with connections(settings, racers) as opened:
        for _ in range(rounds):
            yield opened, asyncio.Barrier(racers)


@ROUNDS
async def test_two_handlings_of_one_completion_issue_one_command(
    settings: Settings, log: EventLog, event: MakeEvent, ids: Snowflake, rounds: int
) -> None:
    async for racers, barrier in races(settings, 2, rounds):
        execution_id = ids.next()
        name = command_id(execution_id, "next")
        published: list[str] = []

        async def handle(connection: Any, execution_id=execution_id, name=name, barrier=barrier) -> None:
            issued = event(execution_id, EventType.COMMAND_ISSUED, meta={"command_id": name})
            await barrier.wait()
            if issued.event_id in await log.append([issued], connection=connection):
                published.append(name)  # noqa: B023

        await asyncio.gather(*map(handle, racers))
        assert published == [name]
        assert await log.pool.fetchval(COUNT, execution_id, "command.issued") == 1


@LONG_ROUNDS
async def test_twenty_completions_make_one_loop_done_and_one_next_command(
    settings: Settings, log: EventLog, event: MakeEvent, ids: Snowflake, rounds: int
) -> None:
    """Each completes its item, then counts: all that see the loop full try to end it."""
    async for racers, barrier in races(settings, 20, rounds):
        execution_id, loop_id = ids.next(), str(ids.next())
        routed: list[int] = []

        async def complete(
            index: int, connection: Any, execution_id=execution_id, loop_id=loop_id, barrier=barrier
        ) -> None:
            meta = {"loop_id": loop_id, "command_id": command_id(execution_id, "work", 1, index)}
            done = event(execution_id, EventType.COMMAND_COMPLETED, meta=meta, current_index=index)
            await barrier.wait()
            await log.append([done], connection=connection)
            ended = await connection.fetchval(COUNT, execution_id, "command.completed")
            if ended < barrier.parties:
                return
            over = event(execution_id, EventType.LOOP_DONE, meta={"loop_id": loop_id})
            if await log.append_once(over, connection=connection):
                following = {"command_id": command_id(execution_id, "next")}
                issued = event(execution_id, EventType.COMMAND_ISSUED, meta=following)
                await log.append([issued], connection=connection)
                routed.append(index)  # noqa: B023

        await asyncio.gather(*(complete(index, one) for index, one in enumerate(racers)))
        assert len(routed) == 1
        assert await log.pool.fetchval(COUNT, execution_id, "loop.done") == 1
        assert await log.pool.fetchval(COUNT, execution_id, "command.issued") == 1


async def test_writers_in_opposite_order_neither_block_nor_lose(
    settings: Settings, pool: asyncpg.Pool[Any], ids: Snowflake, event: MakeEvent
) -> None:
    """Two buffers offer the same commands in opposite order: PostgreSQL may end one of them as a deadlock."""
    buffers = [EventBuffer(EventLog(pool, ids)) for _ in range(4)]
    for _ in range(2):
        execution_id = ids.next()
        names = [command_id(execution_id, "work", 1, index) for index in range(60)]

        async def issue(place: int, buffer: EventBuffer, execution_id=execution_id, names=names) -> int:
            order = names if place % 2 else names[::-1]
            events = [event(execution_id, EventType.COMMAND_ISSUED, meta={"command_id": name}) for name in order]
            return len(await buffer.append(events))

        won = await asyncio.gather(*(issue(place, buffer) for place, buffer in enumerate(buffers)))
        assert sum(won) == len(names)
        assert await pool.fetchval(COUNT, execution_id, "command.issued") == len(names)


async def test_a_refused_event_harms_no_other_of_its_batch(
    pool: asyncpg.Pool[Any], ids: Snowflake, event: MakeEvent
) -> None:
    buffer = EventBuffer(EventLog(pool, ids), linger=0.05)
    good = [event(1, EventType.COMMAND_COMPLETED, meta={"command_id": str(n)}) for n in range(20)]
    bad = event(1, EventType.COMMAND_COMPLETED, meta={"command_id": "bad"}, result={"rows": 1})
    outcomes = await asyncio.gather(
        *(buffer.append([one]) for one in [*good[:10], bad, *good[10:]]), return_exceptions=True
    )
    assert isinstance(outcomes.pop(10), RefusedEventError)
    assert outcomes == [{one.event_id} for one in good]
    assert await pool.fetchval(COUNT, 1, "command.completed") == 20


@pytest.mark.parametrize("bad", [{"result": {"rows": 1}}, {"context": {"x": "\0"}}, {"context": {"x": object()}}])
async def test_a_refused_posted_event_is_reported_to_its_own_execution_only(
    pool: asyncpg.Pool[Any], ids: Snowflake, event: MakeEvent, bad: dict[str, Any]
) -> None:
    buffer = EventBuffer(EventLog(pool, ids))
    await buffer.post([event(1, EventType.COMMAND_COMPLETED, **bad)])
    third = event(3, EventType.WARNING)
    others = [buffer.post([event(2, EventType.WARNING)]), buffer.append([third])]
    later = buffer.append([event(1, EventType.WARNING)])
    outcomes = await asyncio.gather(*others, later, return_exceptions=True)
    assert isinstance(outcomes.pop(), RefusedEventError)
    assert outcomes == [None, {third.event_id}]
    await buffer.flush(2)
    assert await pool.fetchval("SELECT count(*) FROM noetl.event WHERE execution_id IN (1, 2, 3)") == 2
