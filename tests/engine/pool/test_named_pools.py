"""Named pools of workers: commands go to workers of their step's pool and to no others."""

from __future__ import annotations

import asyncio
import logging

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import full_overview
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.capacity import CapacityRegistry, WorkerReport
from noetl_dagster.settings import Settings
from tests.engine.pool.test_claims import enqueue, execution_of, names
from tests.playbooks import playbook
from tests.pool import working
from tests.waiting import until

TWO_POOLS = """
executor: {spec: {pool: small}}
workflow:
  - step: start
    loop: {in: [1, 2, 3], iterator: n}
    spec: {dispatch: workers}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [large]
  - step: large
    spec: {dispatch: workers, pool: large}
    tool: {kind: noop}
"""
CLAIMED_BY = "SELECT DISTINCT node_name, worker_id FROM noetl.event WHERE event_type = 'command.claimed'"
REACHED = "SELECT min(turn), max(turn) FROM noetl.queue WHERE pool = $1"


async def test_a_claim_takes_what_is_its_pools(engine: Engine) -> None:
    claims, ids = Claims(engine.runtime.pool, 300.0), engine.runtime.ids
    execution_id = await execution_of(engine)
    own = await enqueue(engine, execution_id, 3, pool="gpu")
    others = await enqueue(engine, execution_id, 2, start=10)
    assert names(await claims.claim("w", ids.take(9), pool="none")) == []
    assert names(await claims.claim("w", ids.take(9))) == [one.command_id for one in others]
    wanted = [own[0].command_id]
    assert names(await claims.claim("w", ids.take(9), only=wanted)) == []
    assert names(await claims.claim("w", ids.take(9), pool="gpu", only=wanted)) == wanted
    limited = await claims.claim("w", ids.take(9), {"noop": 1}, "gpu")
    assert names(limited) == [own[1].command_id]
    assert names(await claims.claim("w", ids.take(9), pool="gpu")) == [own[2].command_id]


async def test_turns_are_those_of_a_pool(engine: Engine) -> None:
    """A long queue before another pool's workers does not put a newcomer behind."""
    claims, ids, pool = Claims(engine.runtime.pool, 300.0), engine.runtime.ids, engine.runtime.pool
    first, second = [await execution_of(engine) for _ in range(2)]
    await enqueue(engine, first, 50, pool="busy")
    await enqueue(engine, first, 3, start=100, pool="gpu")
    await enqueue(engine, second, 3, pool="gpu")
    assert tuple(await pool.fetchrow(REACHED, "gpu")) < tuple(await pool.fetchrow(REACHED, "busy"))
    granted = names(await claims.claim("w", ids.take(5), pool="gpu"))
    assert sorted(name.partition(":")[0] for name in granted) == sorted(map(str, [first, first, first, second, second]))


async def test_steps_run_on_the_workers_of_their_pools(engine: Engine, settings: Settings) -> None:
    async with (
        working(settings, "w-small", worker_pool="small"),
        working(settings, "w-large", worker_pool="large"),
        working(settings, "w-default"),
    ):
        state = await engine.run(playbook(TWO_POOLS))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    rows = await engine.runtime.pool.fetch(CLAIMED_BY)
    assert {tuple(row) for row in rows} == {("start", "w-small"), ("large", "w-large")}


async def test_a_pool_without_workers_is_told(
    engine: Engine, settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.engine.pool.connection.SWEEP_SECONDS", 0.2)
    execution = await engine.lifecycle.create(playbook(TWO_POOLS))

    async def warned() -> bool:
        found = await full_overview(engine.runtime, execution.id)
        step = next((one for one in found.steps if one.step == "start"), None)
        return step is not None and step.pool is not None and step.pool.unattended == "small"

    with caplog.at_level(logging.WARNING):
        async with working(settings, "w-default"):
            running = asyncio.create_task(engine.resume(execution.id))
            await until(warned, "the status to say so")
            await until(lambda: "no worker of pool small reports" in caplog.text, "the warning")
            assert engine.dispatcher.unattended(execution.id, "start") is not None
            assert engine.dispatcher.unattended(execution.id + 1, "start") is None, "another execution's step"
    async with working(settings, "w1", worker_pool="small"), working(settings, "w2", worker_pool="large"):
        state = await running
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert caplog.text.count("no worker of pool small reports") == 1


def test_who_is_woken() -> None:
    registry = CapacityRegistry()
    registry.heard(WorkerReport(worker_id="other", slots=8, available_slots=8))
    registry.heard(WorkerReport(worker_id="gpu", pool="gpu", slots=2, available_slots=2))
    assert registry.targets(1, {"http"}, "gpu") == ["gpu"]
    assert registry.targets(1, {"http"}) == ["other"]
    assert [registry.attending(pool) for pool in ("gpu", "default", "x")] == [1, 1, 0]


async def test_whether_something_waits_is_looked_up_by_execution(engine: Engine) -> None:
    pool = engine.runtime.pool
    quiet, busy = await execution_of(engine), await execution_of(engine)
    await enqueue(engine, busy, 3_000)
    await pool.execute("ANALYZE noetl.queue")
    assert not await pool.fetchval(queries.SOME_WAIT, [quiet], "default")
    assert await pool.fetchval(queries.SOME_WAIT, [quiet, busy], "default")
    plan = await pool.fetch(f"EXPLAIN {queries.SOME_WAIT}", [quiet], "default")
    assert "idx_queue_execution_pool" in str(plan)
