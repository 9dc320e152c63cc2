"""The projection: in commit order, exactly once, and the same however often it is made."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import Projection, read_execution
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings
from tests import forked
from tests.waiting import PATIENCE_SECONDS, until

from .conftest import MakeEvent, connections

ROW = "SELECT * FROM noetl.execution WHERE execution_id = $1"
ALL = "SELECT * FROM noetl.execution ORDER BY execution_id"
CHECKPOINTS = "SELECT * FROM noetl.projection_checkpoint ORDER BY shard"

BACK = "UPDATE noetl.projection_checkpoint SET xact_id = '0' WHERE shard = ANY($1::int[])"
UNDONE = "DELETE FROM noetl.execution WHERE abs(hashint8(execution_id) % 4) = ANY($1::int[])"


def opening(event: MakeEvent, execution_id: int, items: int, *, fanout: bool = False) -> list[Event]:
    size = {"total_shards": items} if fanout else {"collection_size": items, "mode": "parallel"}
    type_ = EventType.LOOP_FANOUT_STARTED if fanout else EventType.LOOP_STARTED
    loop = {"loop_id": "L1", "visit": 1, "epoch": 1, **size}
    return [
        event(execution_id, EventType.PLAYBOOK_INITIALIZED, node_name="p", meta={"epoch": 1},
              context={"workload": {"n": 1}}),
        event(execution_id, EventType.STEP_ENTER, node_name="work", meta={"visit": 1, "epoch": 1, "turn": 1}),
        event(execution_id, type_, node_name="work", meta=loop, context={"collection_ref": "s3://b/c"}),
    ]  # fmt: skip


def end(
    event: MakeEvent,
    execution_id: int,
    index: int,
    *,
    attempt: int = 1,
    failed: bool = False,
    final: bool = True,
    fanout: bool = False,
) -> Event:
    types = {
        (False, False): EventType.COMMAND_COMPLETED,
        (False, True): EventType.COMMAND_FAILED,
        (True, False): EventType.LOOP_SHARD_DONE,
        (True, True): EventType.LOOP_SHARD_FAILED,
    }
    meta: dict[str, Any] = {"loop_id": "L1", "visit": 1, "attempt": attempt}
    meta["command_id"] = command_id(execution_id, "work", 1, index, attempt)
    if failed:
        meta["final"] = final
    return event(execution_id, types[fanout, failed], node_name="work", meta=meta, current_index=index)


async def settle(projection: Projection) -> None:
    """Projects everything; transactions of other databases may hold the horizon back a while."""
    async with asyncio.timeout(90):
        await projection.catch_up()
        while await projection.lag_seconds() > 0:
            await asyncio.sleep(0.02)
            await projection.catch_up()


async def test_the_state_has_the_seeds_shape(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    looped, fanned = ids.next(), ids.next()
    projection = Projection(pool)
    await log.append(opening(event, looped, 5) + opening(event, fanned, 3, fanout=True))
    await log.append([end(event, looped, 0), end(event, looped, 1), end(event, fanned, 0, fanout=True)])
    await projection.catch_up()
    await log.append(
        [
            end(event, looped, 2, failed=True, final=False),
            end(event, looped, 3, failed=True),
            end(event, fanned, 1, failed=True, fanout=True),
            event(fanned, EventType.LOOP_FANIN_COMPLETED, node_name="work", meta={"loop_id": "L1"},
                  result={"status": "partial"}),
        ]
    )  # fmt: skip
    await settle(projection)
    assert await projection.catch_up() == 0
    loop = (await pool.fetchrow(ROW, looped))["state"]["loop"]["work"]
    assert loop == {
        "step": "work", "visit": 1, "loop_id": "L1", "total": 5, "done": 2, "failed": 1, "mode": "parallel",
        "collection_ref": "s3://b/c", "completed": False,
    }  # fmt: skip
    fanout = (await pool.fetchrow(ROW, fanned))["state"]["fanout"]["work"]
    assert (fanout["total_shards"], fanout["done"], fanout["failed"]) == (3, 1, 1)
    assert fanout["status"] == "partial"


async def test_commits_in_reverse_order_of_their_ids_are_not_skipped(
    settings: Settings, pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    execution_id, count = ids.next(), 12
    projection = Projection(pool)
    await log.append(opening(event, execution_id, count))
    await settle(projection)
    async with connections(settings, count) as writers:
        opened = []
        for index, writer in enumerate(writers):  # transaction ids and event ids in this order
            transaction = writer.transaction()
            await transaction.start()
            await log.append([end(event, execution_id, index)], connection=writer)
            opened.append(transaction)
        for committed, transaction in enumerate(reversed(opened), start=1):
            await transaction.commit()
            await (settle(projection) if committed == count else projection.catch_up())
            done = (await pool.fetchrow(ROW, execution_id))["state"]["loop"]["work"]["done"]
            assert done == (count if committed == count else 0), "below the horizon nothing has settled yet"
            found = await read_execution(pool, execution_id)
            assert found is not None
            assert found.state["loop"]["work"]["done"] == committed, "a reader sees what is committed"


async def test_truncate_and_replay_equals(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    executions = [ids.next() for _ in range(6)]
    projection = Projection(pool)
    for execution_id in executions:
        await log.append(opening(event, execution_id, 10))
        for index in range(10):
            failed = index % 3 == 0
            await log.append([end(event, execution_id, index, failed=failed)])
            if index % 4 == 0:
                await projection.catch_up()
        resumed = event(execution_id, EventType.EXECUTION_RESUMED, node_name="p", meta={"epoch": 2})
        await log.append([resumed])
        await log.append([end(event, execution_id, 0, attempt=2), end(event, execution_id, 3, attempt=2, failed=True)])
        await log.append([event(execution_id, EventType.LOOP_DONE, node_name="work", meta={"loop_id": "L1"})])
        await log.append([event(execution_id, EventType.PLAYBOOK_FAILED, node_name="p", meta={"epoch": 2}, error="x")])
    await settle(projection)
    before = await pool.fetch(ALL)
    assert len(before) == len(executions)
    assert before[0]["state"]["loop"]["work"]["done"] == 7
    assert before[0]["state"]["loop"]["work"]["failed"] == 1
    for batch in (1, 7, 20_000):
        again = Projection(pool, batch=batch)
        await again.rebuild()
        await settle(again)
        assert await pool.fetch(ALL) == before, batch
    for row in before:
        assert (await read_execution(pool, row["execution_id"])).state == row["state"]  # type: ignore[union-attr]


async def test_a_rebuild_that_is_interrupted_changes_nothing(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake, monkeypatch: pytest.MonkeyPatch
) -> None:
    executions = [ids.next() for _ in range(12)]
    for execution_id in executions:
        await log.append(opening(event, execution_id, 3))
    await settle(Projection(pool))
    before = await pool.fetch(ALL)
    again, checkpoints = Projection(pool, batch=5), await pool.fetch(CHECKPOINTS)
    seen = []

    async def project(*arguments: Any) -> None:
        await Projection._project(again, *arguments)
        seen.append(await pool.fetch(ALL))
        if len(seen) == 3:
            raise ConnectionError

    monkeypatch.setattr(again, "_project", project)
    with pytest.raises(ConnectionError):
        await again.rebuild()
    assert seen == [before] * 3, "readers see the old rows until the new ones are complete"
    assert await pool.fetch(ALL) == before
    assert await pool.fetch(CHECKPOINTS) == checkpoints


async def test_shards_that_stand_apart_are_brought_together(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    """As a worker leaves them that had some of the shards while another had the rest."""
    executions = [ids.next() for _ in range(12)]
    projection = Projection(pool, batch=10)
    for turn in range(3):
        for execution_id in executions:
            await log.append([end(event, execution_id, turn)] if turn else opening(event, execution_id, 3))
        await settle(projection)
        behind = [shard for shard in range(4) if shard != turn]
        await pool.execute(BACK, behind)
        await pool.execute(UNDONE, behind)
    await log.append([end(event, executions[0], 0)])
    await settle(projection)
    found = await pool.fetch(ALL)
    assert [row["state"]["loop"]["work"]["done"] for row in found] == [3, *[2] * 11]
    places = await pool.fetch("SELECT DISTINCT xact_id::text FROM noetl.projection_checkpoint")
    assert len(places) == 1, "they are read together from now on"


PROJECTOR = """
import asyncio, sys
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.projection import Projection
async def main():
    projection = Projection(await open_pool(sys.argv[1], size=2), batch=5)
    while True:
        await projection.catch_up()
asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_killing_the_worker_at_any_point_neither_loses_nor_doubles(
    settings: Settings, pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake, rounds: int
) -> None:
    """Two workers at a time are killed in the middle of their work, while events keep coming."""
    assert settings.db_url is not None
    execution_id, written, over = ids.next(), 0, False
    await log.append(opening(event, execution_id, 1_000_000))

    async def write() -> None:
        nonlocal written
        while not over:
            await log.append([end(event, execution_id, place) for place in range(written, written + 3)])
            written += 3
            await asyncio.sleep(0.005)

    async def taken() -> int:
        return int(await pool.fetchval("SELECT COALESCE(sum(events), 0) FROM noetl.projection_checkpoint"))

    writing = asyncio.create_task(write())
    for _ in range(rounds):
        before = await taken()
        workers = [forked.start([sys.executable, "-c", PROJECTOR, settings.db_url]) for _ in range(2)]
        await until(lambda before=before: _more(taken, before), "a worker at work")
        await asyncio.sleep(random.uniform(0, 0.1))
        for worker in workers:
            worker.kill()
    over = True
    await writing
    await settle(Projection(pool))
    assert (await pool.fetchrow(ROW, execution_id))["state"]["loop"]["work"]["done"] == written


async def _more(taken: Callable[[], Awaitable[int]], before: int) -> bool:
    return await taken() > before


async def test_the_lag_is_a_metric(pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake) -> None:
    projection = Projection(pool)
    assert await projection.lag_seconds() == 0.0
    await log.append(opening(event, ids.next(), 3))
    await asyncio.sleep(0.05)
    assert await projection.lag_seconds() >= 0.05
    await settle(projection)
    assert await projection.lag_seconds() == 0.0


async def test_who_is_patient_waits_for_the_worker_that_is_at_it(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    projection, execution_id = Projection(pool), ids.next()
    await settle(projection)
    await log.append(opening(event, execution_id, 3))
    async with pool.acquire() as other:
        working = other.transaction()
        await working.start()
        await other.execute(queries.LOCK_CHECKPOINTS)
        assert await projection.catch_up() == 0
        waiting = asyncio.create_task(projection.catch_up(patient=True))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await working.rollback()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waiting
    await settle(projection)
    assert await pool.fetchrow(ROW, execution_id) is not None


async def test_events_that_arrive_meanwhile_are_left_to_the_next_call(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    projection, execution_id, batches = Projection(pool), ids.next(), 0
    await settle(projection)
    await log.append(opening(event, execution_id, 100))

    class Watched(Projection):
        async def _apply_batch(self, connection: Any, lock: str) -> Any:
            nonlocal batches
            batches += 1
            found = await super()._apply_batch(connection, lock)
            await log.append([end(event, execution_id, batches)])
            return found

    async with asyncio.timeout(PATIENCE_SECONDS):
        await Watched(pool).catch_up()
    assert batches <= 2, "shards with different checkpoints take one batch more"
    await settle(projection)
    row = await pool.fetchrow(ROW, execution_id)
    assert row["state"]["loop"]["work"]["done"] == batches
