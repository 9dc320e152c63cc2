"""The connection that lone appends share: quicker than the pool's, never in anybody's way."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.connection import DATABASE_AWAY, KeptConnection, open_pool
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings
from tests.waiting import HERE, until

from .conftest import MakeEvent

PID = "SELECT pg_backend_pid()"


async def test_it_goes_back_to_the_pool_by_itself(pool: asyncpg.Pool[Any]) -> None:
    kept = KeptConnection(pool)
    for number in range(10):
        assert await kept.fetchval("SELECT $1::int", number) == number
    await until(lambda: pool.get_idle_size() == pool.get_size(), "its return to the pool")
    assert await kept.fetchval("SELECT 1") == 1


async def test_statements_at_the_same_time_do_not_wait_for_each_other(
    settings: Settings, pool: asyncpg.Pool[Any]
) -> None:
    kept, gate = KeptConnection(pool), await asyncpg.connect(settings.db_url)
    await gate.execute("SELECT pg_advisory_lock(1)")
    waiting = [
        asyncio.create_task(kept.fetchval("SELECT pg_backend_pid() FROM pg_advisory_lock_shared(1)")) for _ in range(4)
    ]
    at_the_gate = f"SELECT count(*) = 4 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND {HERE}"
    await until(lambda: gate.fetchval(at_the_gate), "all four to run at once")
    await gate.close()
    assert len(set(await asyncio.gather(*waiting))) == 4


async def test_a_pool_of_one_connection_serves_others_too(settings: Settings, event: MakeEvent, ids: Snowflake) -> None:
    assert settings.db_url is not None
    pool = await open_pool(settings.db_url, size=1)
    buffer = EventBuffer(EventLog(pool, ids))
    for number in range(5):
        await buffer.append([event(1, EventType.COMMAND_COMPLETED, meta={"command_id": str(number)})])
        assert await pool.fetchval("SELECT count(*) FROM noetl.event") == number + 1
    await pool.close()


async def test_a_connection_that_broke_is_replaced(pool: asyncpg.Pool[Any]) -> None:
    kept = KeptConnection(pool)
    pid = await kept.fetchval(PID)
    await pool.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND datname = current_database()"
    )

    async def another() -> bool:
        try:
            return bool(await kept.fetchval(PID) != pid)
        except DATABASE_AWAY:  # once, while it is noticed
            return False

    await until(another, "another connection")
    await until(lambda: pool.get_idle_size() == pool.get_size(), "its return to the pool")


async def test_a_cancelled_statement_leaves_it_usable(pool: asyncpg.Pool[Any]) -> None:
    kept = KeptConnection(pool)
    waiting = asyncio.create_task(kept.fetchval("SELECT pg_sleep(60)"))
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"
    await until(lambda: pool.fetchval(f"{sleeping} AND datname = current_database()"), "it to run")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await kept.fetchval("SELECT 7") == 7
    await until(lambda: pool.get_idle_size() == pool.get_size(), "its return to the pool")
