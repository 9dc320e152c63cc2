"""What happens when workers, or the streams of NATS, are gone for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.transport.capacity import WorkerReport, publish_report
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import CommandEvents, Outcome
from noetl_dagster.worker.context import Batch
from tests.drivers import drive
from tests.playbooks import playbook
from tests.pool import working
from tests.pool_worker.conftest import soon_missed
from tests.waiting import PATIENCE_SECONDS, until

ONE = """
workflow:
  - step: start
    spec: {dispatch: workers, max_attempts: 2}
    tool: {kind: noop}
"""
LOOP = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: [1, 2, 3, 4, 5], iterator: n, mode: parallel}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
"""
WAITING = "SELECT execution_id, command_id FROM noetl.queue WHERE status = 'queued'"
CLAIMS = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed'"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return soon_missed(settings)


async def test_a_command_that_every_worker_leaves_unfinished_fails(engine: Engine) -> None:
    running = asyncio.create_task(engine.run(playbook(ONE)))
    pool = engine.runtime.pool
    ghosts = Claims(pool, lease_seconds=0.01)
    for number in range(2):
        row = await until(lambda: pool.fetchrow(WAITING), f"the command to wait for worker {number}")
        ids = engine.runtime.ids.take(1)
        granted = await ghosts.claim(f"ghost {number}", ids, only=[row["command_id"]])
        [(_, _, grant)] = Batch.model_validate_json(ghosts.answer(granted)).grants()
        assert grant.claim == number + 1
    state = await asyncio.wait_for(running, PATIENCE_SECONDS)
    assert state.status is ExecutionStatus.FAILED
    error = state.latest["start"].envelope["error"]
    assert error["code"] == "LEASE_EXPIRED"
    assert "2 workers in turn claimed it" in error["message"]
    assert "spec.max_attempts" in error["message"]
    assert await pool.fetchval(CLAIMS, state.execution_id) == 2
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0


async def test_commands_whose_rows_somebody_deletes_are_queued_again(engine: Engine, settings: Settings) -> None:
    """Neither one that ends just now, nor with the claim that was deleted."""
    running = asyncio.create_task(engine.run(playbook(LOOP)))
    runtime = engine.runtime
    pool, commands = runtime.pool, CommandEvents(runtime.ids, "ghost")

    async def waiting(count: int) -> list[str]:
        names = sorted(row["command_id"] for row in await pool.fetch(WAITING))
        return names if len(names) == count else []

    names = await until(lambda: waiting(5), "the commands to wait")
    ghost = Claims(pool, lease_seconds=3600)
    granted = await ghost.claim("ghost", runtime.ids.take(2), only=names[:2])
    held = [
        grant.context.command(grant.execution_id, None, event_id)
        for _, event_id, grant in Batch.model_validate_json(ghost.answer(granted)).grants()
    ]
    ends = [commands.ended(command, Outcome({"status": "ok", "data": "of the ghost"})) for command in held]
    ending, late = sorted(ends, key=lambda end: names.index(end.meta["command_id"]))
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert (await runtime.handler.take_events([ending], connection=connection)).new == {ending.event_id}
        await pool.execute("DELETE FROM noetl.queue WHERE command_id = ANY($1::text[])", names[1:3])
        assert await until(lambda: waiting(4), "the commands to wait again") == names[1:]
        await transaction.commit()
    assert (await runtime.handler.take_events([late])).refused == {late.event_id}
    async with working(settings, "w1"):
        state = await asyncio.wait_for(running, PATIENCE_SECONDS)
    succeeded(state)
    results = [item["data"] for item in state.latest["start"].envelope["results"]]
    assert results == ["of the ghost", 4, 9, 16, 25]
    events = [event async for event in runtime.log.events(state.execution_id)]
    [warning] = [event.error for event in events if event.event_type == "warning"]
    assert warning is not None
    assert "lost the rows of 2 commands" in warning
    assert await pool.fetchval(CLAIMS, state.execution_id) == 6
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0


async def test_what_a_dead_worker_had_of_a_dead_op_is_offered_to_others(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    """A machine goes with an op and a worker on it: no process knows of the worker's claims."""
    execution = await engine.lifecycle.create(playbook(LOOP))
    pool, names = engine.runtime.pool, NatsNames(settings)
    client = await connect(settings, "ghost")
    report = WorkerReport(worker_id="ghost", slots=9, available_slots=9, interval=3600)

    async def answer(_: Msg) -> None:
        await publish_report(client, report)

    await client.subscribe(f"{names.capacity}.report.now", cb=answer)
    op = drive(embedded.environment(settings), execution.id, tmp_path / "said.txt")

    async def all_wait() -> bool:
        return len(await pool.fetch(WAITING)) == 5

    await until(all_wait, "the commands to wait")
    claims = Claims(pool, lease_seconds=3600)
    assert sum(len(one.waited) for one in await claims.claim("ghost", engine.runtime.ids.take(2))) == 2
    op.kill()
    await asyncio.to_thread(op.join)
    await client.close()
    patient = settings.model_copy(update={"command_heartbeat_timeout_seconds": 3600.0})
    other = await Engine.open(patient)
    async with working(patient, "w1"):
        succeeded(await asyncio.wait_for(other.resume(execution.id), PATIENCE_SECONDS))
    await other.close()
    assert await pool.fetchval(CLAIMS, execution.id) == 7


def succeeded(state: ExecutionState) -> None:
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["start"].envelope["results"] is not None
    assert state.latest["start"].envelope["done"] == 5
