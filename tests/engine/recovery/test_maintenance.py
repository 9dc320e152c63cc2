"""Retention: an old month goes with its executions and their results; the coming months are ready."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery import maintenance as maintaining
from noetl_dagster.engine.recovery.maintenance import Maintained, Maintenance
from noetl_dagster.engine.steps.watermarks import keep_watermarks, watermarks
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.schema import ensure_partitions
from noetl_dagster.events.types import Event, EventType
from tests.waiting import until

OLD = datetime(2025, 3, 1, tzinfo=UTC)
NOW = datetime(2025, 6, 15, tzinfo=UTC)


def execution_of(moment: datetime) -> int:
    return snowflake_floor(moment) + 5


FRAME = """
INSERT INTO noetl.cursor_frame
    (execution_id, loop_id, first_index, step, visit, rows, by_row, lease_until, claim_xid)
VALUES ($1, '1', 0, 's', 1, '[]', true, now(), 1)
"""

WAITING = "SELECT count(*) FROM pg_locks WHERE relation = 'noetl.event_y2025m03'::regclass AND NOT granted"


async def start(engine: Engine, execution_id: int, *, ended: bool = True) -> None:
    ids = engine.runtime.ids
    events = [Event(execution_id, ids.next(), EventType.PLAYBOOK_INITIALIZED, node_name="p", meta={"epoch": 1})]
    if ended:
        events.append(Event(execution_id, ids.next(), EventType.PLAYBOOK_COMPLETED, node_name="p", meta={"epoch": 1}))
    await engine.runtime.log.append(events)


@pytest.fixture
async def old_month(engine: Engine) -> None:
    async with engine.runtime.pool.acquire() as connection:
        await ensure_partitions(connection, OLD)


async def maintain(engine: Engine) -> Maintained:
    runtime = engine.runtime
    return await Maintenance(runtime.pool, runtime.results, timedelta(days=60)).run(NOW)


async def tables(engine: Engine) -> set[str]:
    rows = await engine.runtime.pool.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'noetl'::regnamespace AND relkind = 'r'"
    )
    return {row["relname"] for row in rows}


async def projected(engine: Engine, count: int) -> None:
    """Waits for the projection: a long transaction of another test on this server holds its horizon back."""

    async def found() -> bool:
        await Projection(engine.runtime.pool).catch_up()
        return bool(await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.execution") == count)

    await until(found, f"{count} executions in the projection")


@pytest.mark.usefixtures("months_ahead", "old_month")
async def test_an_old_month_goes_with_all_that_belongs_to_it(engine: Engine) -> None:
    runtime = engine.runtime
    old, recent = execution_of(OLD + timedelta(days=3)), execution_of(NOW)
    stored: dict[int, Any] = {}
    for execution_id in (old, recent):
        await start(engine, execution_id)
        await runtime.pool.execute(FRAME, execution_id)
        stored[execution_id] = await runtime.results.put(["x" * 20_000], execution_id=execution_id, step="s", name="r")
    await projected(engine, 2)
    maintained = await maintain(engine)
    assert maintained.dropped == ("event_y2025m03",)
    assert (maintained.executions, maintained.results) == (1, 1)
    assert "event_y2025m09" in maintained.made
    left = [row["execution_id"] for row in await runtime.pool.fetch("SELECT execution_id FROM noetl.execution")]
    assert left == [recent]
    frames = await runtime.pool.fetch("SELECT execution_id FROM noetl.cursor_frame")
    assert [row["execution_id"] for row in frames] == [recent]
    assert "event_y2025m03" not in await tables(engine)
    assert await runtime.results.get(stored[recent]) == ["x" * 20_000]
    assert await runtime.pool.fetchval("SELECT count(*) FROM noetl.result_ref") == 1
    again = await maintain(engine)
    assert (again.dropped, again.made) == ((), ())


@pytest.mark.usefixtures("old_month")
async def test_how_far_an_old_month_had_loaded_is_kept(engine: Engine) -> None:
    """But not what a later month knows better, nor what does not count."""
    runtime = engine.runtime
    completed, failed, recent = execution_of(OLD), execution_of(OLD) + 1, execution_of(NOW)

    async def loaded(execution_id: int, name: str, value: int, **more: Any) -> None:
        place = {"playbook": "p", "name": name, "partition": "", "since": "0"}
        kept = {**place, "value": value, "previous": 0, "number": value, **more}
        meta = {"visit": 1, "epoch": 1, "watermark": kept}
        event = Event(execution_id, runtime.ids.next(), EventType.STEP_EXIT, name, meta=meta)
        await runtime.log.append([event])

    await start(engine, completed)
    await loaded(completed, "rare", 5, pending=True)
    await loaded(completed, "often", 5)
    await loaded(failed, "rare", 9, pending=True)
    await loaded(recent, "often", 6)
    before = {one.name: one for one in await watermarks(runtime.pool, "p")}
    maintained = await maintain(engine)
    assert maintained.dropped == ("event_y2025m03",)
    assert {one.name: one for one in await watermarks(runtime.pool, "p")} == before
    assert (before["rare"].value, before["often"].value) == (5, 6)
    assert await runtime.pool.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'state.set'") == 1


@pytest.mark.usefixtures("old_month")
async def test_a_month_with_a_running_execution_stays(engine: Engine) -> None:
    """Also while the projection has not seen it: an open transaction keeps it from reading on."""
    runtime = engine.runtime
    async with runtime.pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_current_xact_id()")
        await start(engine, execution_of(OLD), ended=False)
        maintained = await maintain(engine)
        assert await runtime.pool.fetchval("SELECT count(*) FROM noetl.execution") == 0
    assert maintained.still_running == ("event_y2025m03",)
    assert "event_y2025m03" in await tables(engine)


@pytest.mark.usefixtures("old_month")
async def test_a_month_with_a_resumed_execution_stays_until_it_has_ended(engine: Engine) -> None:
    runtime = engine.runtime
    execution_id = execution_of(OLD)
    await start(engine, execution_id)
    resumed = Event(execution_id, runtime.ids.next(), EventType.EXECUTION_RESUMED, meta={"epoch": 2})
    await runtime.log.append([resumed])
    assert (await maintain(engine)).still_running == ("event_y2025m03",)
    failed = Event(execution_id, runtime.ids.next(), EventType.PLAYBOOK_FAILED, meta={"epoch": 2})
    await runtime.log.append([failed])
    assert (await maintain(engine)).dropped == ("event_y2025m03",)


@pytest.mark.usefixtures("old_month")
async def test_an_execution_that_is_resumed_beside_the_drop_keeps_its_events(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = engine.runtime
    execution_id = execution_of(OLD)
    await start(engine, execution_id)
    event = Event(execution_id, runtime.ids.next(), EventType.EXECUTION_RESUMED, meta={"epoch": 2})
    resuming: list[asyncio.Task[set[int]]] = []

    async def keep(*arguments: Any) -> None:
        """Resumes after it was looked for running executions."""
        if not resuming:
            resuming.append(asyncio.create_task(runtime.log.append([event])))
            await until(have_resumed_or_wait, "the resumption")
        await keep_watermarks(*arguments)

    async def have_resumed_or_wait() -> bool:
        return resuming[0].done() or bool(await runtime.pool.fetchval(WAITING))

    monkeypatch.setattr(maintaining, "keep_watermarks", keep)
    maintained = await maintain(engine)

    assert await resuming[0] == {event.event_id}
    assert maintained.still_running == ("event_y2025m03",)
    assert len(await runtime.log.lifecycle(execution_id)) == 3


async def test_events_that_came_before_their_partition_move_into_it(engine: Engine) -> None:
    late = execution_of(datetime(2030, 2, 10, tzinfo=UTC))
    await start(engine, late)
    pool = engine.runtime.pool
    assert await pool.fetchval("SELECT count(*) FROM noetl.event_default") == 2
    async with pool.acquire() as connection:
        made = await ensure_partitions(connection, datetime(2030, 2, 1, tzinfo=UTC))
    assert "event_y2030m02" in made
    assert await pool.fetchval("SELECT count(*) FROM noetl.event_default") == 0
    assert await pool.fetchval("SELECT count(*) FROM noetl.event_y2030m02") == 2
    assert (await engine.runtime.log.lifecycle(late))[0].event_type == EventType.PLAYBOOK_INITIALIZED


@pytest.mark.usefixtures("months_ahead", "old_month")
async def test_partitions_come_and_go_beside_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open appends do not delay new partitions; an old one stays for the next maintenance while a query reads it."""
    monkeypatch.setattr(maintaining, "DROP_SECONDS", 0.1)
    runtime = engine.runtime
    async with runtime.pool.acquire() as connection, connection.transaction():
        event = Event(execution_of(NOW), runtime.ids.next(), EventType.PLAYBOOK_INITIALIZED, "p", meta={"epoch": 1})
        await runtime.log.append([event], connection=connection)
        maintained = await maintain(engine)
        assert "event_y2025m09" in maintained.made
        assert maintained.still_running == ("event_y2025m03",)
    assert (await maintain(engine)).dropped == ("event_y2025m03",)


async def test_partitions_of_a_day_follow_those_of_months(engine: Engine) -> None:
    """No partition covers what another one does, whichever width came first."""
    runtime, day = engine.runtime, timedelta(days=1)
    days = Maintenance(runtime.pool, runtime.results, 2 * day, width=day)
    months = Maintenance(runtime.pool, runtime.results)
    april = [f"event_y2025m04d{number:02d}t000000" for number in range(10)]
    for maintenance, now, made, dropped in (
        (months, datetime(2025, 3, 5), ("event_y2025m03",), ()),
        (days, datetime(2025, 3, 30), (), ()),
        (days, datetime(2025, 4, 1), (april[1],), ()),
        (days, datetime(2025, 4, 2), (april[2],), ()),
        (days, datetime(2025, 4, 3), (april[3],), ("event_y2025m03",)),
        (months, datetime(2025, 4, 3), (april[4],), ()),  # the rest of April
        (days, datetime(2025, 4, 5), (), (april[1], april[2])),
    ):
        await start(engine, execution_of(now.replace(hour=7, tzinfo=UTC)))
        done = await maintenance.run(now.replace(hour=12, tzinfo=UTC))
        assert (done.made, done.dropped) == (made, dropped), now
    assert await runtime.pool.fetchval("SELECT count(*) FROM noetl.event") == 4
    assert await runtime.pool.fetchval("SELECT count(*) FROM noetl.event_default") == 0


async def test_workers_that_are_gone_are_forgotten(engine: Engine) -> None:
    pool = engine.runtime.pool
    await pool.execute(
        "INSERT INTO noetl.runtime (worker_id, heartbeat) SELECT hours::text, $1::timestamptz - make_interval(hours => hours) "
        "FROM unnest(ARRAY[0, 23, 25, 500]) AS hours",
        NOW,
    )
    await engine.maintenance().run(NOW)
    left = await pool.fetch("SELECT worker_id FROM noetl.runtime ORDER BY 1")
    assert [row["worker_id"] for row in left] == ["0", "23"]
