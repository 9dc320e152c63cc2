"""Claims expire: a silent worker's command goes to another, and nobody completes it twice (seed P0.4)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.engine.pool.reaper import Reaper
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.worker.command import Command, CommandEvents, Outcome
from noetl_dagster.worker.context import Shared, own_context
from tests.playbooks import playbook

LEASE = 10.0
ENQUEUE = """
INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, max_attempts, context)
VALUES ($1, $2, $3, $4, 'noop', $5, $6)
"""


@pytest.fixture
def handler(engine: Engine) -> EventHandler:
    return EventHandler(engine.runtime.log, LEASE)


async def execution(engine: Engine) -> int:
    created = await engine.lifecycle.create(playbook("workflow: [{step: work, tool: {kind: noop}}]"))
    return created.id


async def enqueue(engine: Engine, command: Command, max_attempts: int = 3) -> None:
    issued = engine.runtime.commands.issued(command, "noop")
    await engine.runtime.log.append([issued])
    context = Shared.of(command).context() | own_context(command)
    await engine.runtime.pool.execute(
        ENQUEUE,
        command.execution_id,
        command.command_id,
        issued.event_id,
        command.step,
        max_attempts,
        context,
    )


async def lease_ends_in(engine: Engine, seconds: float) -> None:
    """Lets time pass: the claims of the queue end so many seconds from now, or have ended when negative."""
    change = "UPDATE noetl.queue SET lease_until = now() + make_interval(secs => $1)"
    await engine.runtime.pool.execute(change, seconds)


async def test_a_silent_workers_command_is_done_once_by_another(engine: Engine, handler: EventHandler) -> None:
    pool, ids, done = engine.runtime.pool, engine.runtime.ids, Outcome({"status": "ok", "data": 1})
    reaper, claims = Reaper(pool, handler, engine.runtime.commands), Claims(pool, LEASE)
    command = Command(await execution(engine), "work", index=3, loop_id="1")
    await enqueue(engine, command)
    original, other = (CommandEvents(ids, worker_id=name) for name in ("original", "other"))
    claim, again = ids.take(2)
    first, second = replace(command, claim=claim), replace(command, claim=again)
    assert await claims.claim("original", [claim], only=[command.command_id])
    await lease_ends_in(engine, -1.0)
    await handler.take_events([original.heartbeat(first)])
    assert (await reaper.reap()).requeued == (), "a heart that beats keeps its lease"

    await lease_ends_in(engine, -1.0)
    [requeued] = (await reaper.reap()).requeued
    assert (requeued.command_id, requeued.attempts) == (command.command_id, 1)
    assert (await reaper.reap()).requeued == ()

    assert await claims.claim("other", [again], only=[command.command_id])
    end, late = other.ended(second, done), original.ended(first, done)
    assert (await handler.take_events([end])).new == {end.event_id}
    assert (await handler.take_events([late])).new == set()
    rows = await pool.fetch(
        "SELECT event_type, worker_id, meta ->> 'claim' AS claim FROM noetl.event WHERE execution_id = $1 "
        "AND event_type IN ('command.claimed', 'command.completed') ORDER BY created_at",
        command.execution_id,
    )
    assert [tuple(row) for row in rows] == [
        ("command.claimed", "original", None),
        ("command.claimed", "other", "2"),
        ("command.completed", "other", None),
    ]
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0


@pytest.mark.parametrize("shard", [False, True])
async def test_a_command_that_silences_every_worker_fails(engine: Engine, handler: EventHandler, shard: bool) -> None:
    pool, ids = engine.runtime.pool, engine.runtime.ids
    reapers = [Reaper(pool, handler, engine.runtime.commands) for _ in range(3)]
    command = Command(await execution(engine), "work", index=3, loop_id="1", shard=shard)
    await enqueue(engine, command, max_attempts=2)
    claims = Claims(pool, LEASE)
    for turn in (1, 2):
        assert await claims.claim(f"w{turn}", [ids.next()], only=[command.command_id])
        assert not await claims.claim("thief", [ids.next()], only=[command.command_id])
        await lease_ends_in(engine, -1.0)
        reaped = await asyncio.gather(*(reaper.reap() for reaper in reapers))
        assert sum(len(one.requeued) for one in reaped) == (turn == 1)
        assert sum(len(one.failed) for one in reaped) == (turn == 2)
    type_ = "loop.shard.failed" if shard else "command.failed"
    [failure] = await pool.fetch("SELECT * FROM noetl.event WHERE event_type = $1", type_)
    assert failure["meta"]["final"] is True
    assert "w2" in failure["error"]
    assert failure["result"]["context"]["error"]["code"] == "LEASE_EXPIRED"


@pytest.mark.parametrize(
    "context", [{}, [], "x", {"step": 1}, {"step": "work", "visit": "x"}, {"step": "work", "meta": 1}]
)
async def test_a_malformed_row_ends_without_the_others_of_its_batch(
    engine: Engine, handler: EventHandler, context: Any
) -> None:
    pool, execution_id = engine.runtime.pool, await execution(engine)
    for index in range(2):
        await enqueue(engine, Command(execution_id, "work", index=index, loop_id="1"), max_attempts=1)
    assert await Claims(pool, LEASE).claim("w", [engine.runtime.ids.next() for _ in range(2)])
    malformed = "UPDATE noetl.queue SET context = $1, shared = '{}' WHERE command_id LIKE '%:work:1:0:1'"
    assert await pool.execute(malformed, context) == "UPDATE 1"
    await lease_ends_in(engine, -1.0)
    assert len((await Reaper(pool, handler, engine.runtime.commands).reap()).failed) == 2
    errors = await pool.fetch("SELECT error FROM noetl.event WHERE event_type = 'command.failed' ORDER BY error")
    assert ["is malformed" in row["error"] for row in errors] == [True, False]
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0
