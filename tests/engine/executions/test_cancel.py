"""Cancellation reaches whoever drives: no new commands, running ones stopped, one ``execution.cancelled``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import overview
from noetl_dagster.engine.interruptions import InterruptionWatch
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.errors import ExecutionCancelledError, ExecutionStateError, TemplateError
from noetl_dagster.events.rules import broken_rules
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS, until

SLOW = """
workflow:
  - step: start
    loop: {in: "{{ range(50) | list }}", iterator: n, spec: {mode: parallel, max_in_flight: 3}}
    tool: {kind: shell, command: "sleep 600"}
    next: [after]
  - {step: after, tool: {kind: noop}}
"""
PARENT = """
workflow:
  - step: start
    tool: {kind: playbook, path: tests/child}
"""
COUNT = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = $2"
QUICK = """
workflow:
  - step: start
    loop: {in: "{{ range(20000) }}", iterator: n, spec: {mode: parallel, max_in_flight: 20}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
"""
FANOUT = QUICK.replace(
    "spec: {mode: parallel, max_in_flight: 20}}", "spec: {mode: parallel}}\n    spec: {loop_mode: fanout}"
).replace("20000", "1000")
RETRIED = (
    FANOUT
    + """
    retry: [{when: "{{ error is defined }}", then: {max_attempts: 3}}]
"""
)
PARTITIONED = FANOUT.replace("fanout}", "fanout, fanout: {granularity: partition, max_groups: 100}}")
UNENDED = """
SELECT meta ->> 'command_id' FROM noetl.event begun WHERE execution_id = $1 AND event_type = 'command.claimed'
EXCEPT
SELECT meta ->> 'command_id' FROM noetl.event WHERE execution_id = $1 AND event_type IN
    ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
"""
ENDS = """
SELECT event_type, current_index, worker_id, error, result #>> '{context,error,kind}' AS kind FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('command.failed', 'loop.shard.failed')
ORDER BY current_index
"""
CURSOR = """
workflow:
  - step: start
    loop:
      cursor: {kind: postgres, auth: pg, claim: "CLAIM"}
      iterator: job
      spec: {mode: cursor, max_in_flight: 1}
    tool: {kind: shell, command: "sleep 600"}
"""
TAKE = "UPDATE chores SET state = 'claimed' WHERE state = 'new' AND id < 4 RETURNING id"


async def claimed(engine: Engine, execution_id: int, count: int = 1) -> None:
    """Waits until commands of an execution run."""
    pool = engine.runtime.pool

    async def enough() -> bool:
        return bool(await pool.fetchval(COUNT, execution_id, "command.claimed") >= count)

    await until(enough)


async def test_cancelling_stops_the_running_commands_of_another_process(engine: Engine, settings: Settings) -> None:
    execution = await engine.lifecycle.create(playbook(SLOW))
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await claimed(engine, execution.id, 3)
    other = await Engine.open(settings)
    try:
        outcomes = await asyncio.gather(*(other.lifecycle.cancel(execution.id, "enough") for _ in range(5)))
        async with asyncio.timeout(PATIENCE_SECONDS):  # far sooner than the commands themselves would end
            with pytest.raises(ExecutionCancelledError, match="enough"):
                await work
    finally:
        await other.close()
    await engine.runtime.buffer.flush()
    pool = engine.runtime.pool
    assert sorted(outcomes) == [False] * 4 + [True]
    assert await pool.fetchval(COUNT, execution.id, "execution.cancelled") == 1
    assert await pool.fetchval(COUNT, execution.id, "command.claimed") == 3
    ends = await pool.fetch(ENDS, execution.id)
    assert [(end["event_type"], end["current_index"], end["kind"]) for end in ends] == [
        ("command.failed", index, "cancelled") for index in range(3)
    ]
    assert {end["worker_id"] for end in ends} == {engine.runtime.commands.worker_id}
    assert all("enough" in end["error"] for end in ends)
    state = (await engine.runtime.load(execution.id)).state
    assert state.status is ExecutionStatus.CANCELLED
    assert state.error == "enough"
    found = await overview(engine.runtime, execution.id)
    assert [(step.step, step.status) for step in found.steps] == [("start", "CANCELLED")]
    with pytest.raises(ExecutionStateError, match="CANCELLED"):
        await engine.lifecycle.resume(execution.id)


@pytest.mark.parametrize("text", [QUICK, RETRIED, PARTITIONED], ids=["loop", "fanout", "parts"])
async def test_every_claim_has_an_end_however_busy_the_driver_is(engine: Engine, settings: Settings, text: str) -> None:
    pool = engine.runtime.pool
    other = await Engine.open(settings)
    execution = await engine.lifecycle.create(playbook(text))
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await claimed(engine, execution.id, 20)

    assert await other.lifecycle.cancel(execution.id, "enough")
    at_once = await pool.fetchval(COUNT, execution.id, "command.claimed")
    assert await pool.fetch(UNENDED, execution.id) == []
    with pytest.raises(ExecutionCancelledError):
        await work
    await engine.runtime.buffer.flush()

    assert await pool.fetch(UNENDED, execution.id) == []
    assert await pool.fetchval(COUNT, execution.id, "command.claimed") == at_once
    assert (await broken_rules(pool, [execution.id])).counts == {}, "no result without a claim"
    await other.close()


async def test_a_cursor_that_claims_while_it_is_cancelled_says_what_it_got(engine: Engine) -> None:
    pool = engine.runtime.pool
    await pool.execute("CREATE TABLE chores AS SELECT id, 'new' AS state FROM generate_series(1, 9) AS id")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'UPDATE chores%' AND wait_event_type = 'Lock'"
    async with pool.acquire() as connection:
        async with connection.transaction():
            await connection.execute("SELECT FROM chores WHERE id = 2 FOR UPDATE")
            execution = await engine.lifecycle.create(playbook(CURSOR.replace("CLAIM", TAKE)))
            work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
            await until(lambda: pool.fetchval(waiting), "the claim to wait for a row")
            assert await engine.lifecycle.cancel(execution.id)
        with pytest.raises(ExecutionCancelledError):
            await work
    taken = [row["id"] for row in await pool.fetch("SELECT id FROM chores WHERE state = 'claimed' ORDER BY id")]
    items = "SELECT current_item FROM noetl.event WHERE event_type = 'loop.item' ORDER BY current_index"
    assert [row["current_item"] for row in await pool.fetch(items)] == [{"id": id} for id in taken]
    ends = await pool.fetch(ENDS, execution.id)
    assert [(end["current_index"], end["kind"]) for end in ends] == [(n, "cancelled") for n in range(3)]
    assert await pool.fetchval(COUNT, execution.id, "command.issued") == 0
    assert taken == [1, 2, 3]


async def test_children_are_cancelled_with_their_parent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what cursor loops had claimed cannot be given back."""

    async def fail(runtime: Any, execution_id: int) -> int:
        raise TemplateError("no such name")

    monkeypatch.setattr("noetl_dagster.engine.executions.lifecycle.release_expired", fail)
    await engine.runtime.log.put_source(
        "tests/child", None, playbook(SLOW).source.replace("tests/sample", "tests/child")
    )
    execution = await engine.lifecycle.create(playbook(PARENT))
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    query = "SELECT execution_id FROM noetl.event WHERE parent_execution_id = $1 AND event_type = 'command.claimed'"

    async def begun() -> Any:
        return work.done() or await engine.runtime.pool.fetchval(query, execution.id)

    child = await until(begun)
    assert not work.done(), work.result().error
    assert await engine.lifecycle.cancel(execution.id, "enough")
    with pytest.raises(ExecutionCancelledError):
        await work
    state = (await engine.runtime.load(child)).state
    assert state.status is ExecutionStatus.CANCELLED
    assert state.error is not None
    assert "parent" in state.error


async def test_a_later_epoch_stops_the_driver_of_an_earlier_one(engine: Engine, settings: Settings) -> None:
    execution = await engine.lifecycle.create(playbook(SLOW))
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await claimed(engine, execution.id)
    other = await Engine.open(settings)
    try:
        resumed = await other.lifecycle.resume(execution.id)
        with pytest.raises(ExecutionStateError, match="epoch 2"):
            await work
        assert resumed.state.epoch == 2
    finally:
        await other.lifecycle.cancel(execution.id)
        await other.close()


async def test_the_watch_survives_a_lost_connection(engine: Engine) -> None:
    execution = await engine.lifecycle.create(playbook(SLOW))
    await engine.liveness.hold(execution.id)
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    await claimed(engine, execution.id)
    await engine.runtime.pool.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'noetl-drive-%' "
        "AND datname = current_database()"
    )
    await engine.lifecycle.cancel(execution.id)
    with pytest.raises(ExecutionCancelledError):
        await asyncio.wait_for(work, PATIENCE_SECONDS)
    await engine.liveness.hold(execution.id)
    assert await engine.liveness.is_driven(execution.id)


async def test_a_command_does_not_wait_for_a_database_that_is_away(engine: Engine) -> None:
    """Workers send events over NATS or HTTP: what they have claimed runs on through an outage."""
    unreachable = Liveness("postgresql://127.0.0.1:9/nowhere", engine.runtime.pool)
    watch = InterruptionWatch(engine.runtime.pool, unreachable)
    assert await watch.guard(1, asyncio.sleep(0.05, "done")) == "done"
    await watch.close()
