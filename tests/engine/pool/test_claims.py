"""Many commands in one claim: each goes to one worker, executions take turns, nothing is lost or taken twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import asyncpg
import orjson
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.claims import ClaimRow, Claims, States
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.pool_worker.claimer import Claimer
from noetl_dagster.pool_worker.control import DirectControl, Executions
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.context import Batch, Shared, own_context
from noetl_dagster.worker.running import Heartbeats
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS, until
from tests.whole import held_up

TEXT = "workflow: [{step: work, tool: {kind: noop}}]"
QUEUED = "SELECT count(*) FROM noetl.queue WHERE status = 'queued'"
WAITS = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND datname = current_database()
"""

# the second of two ends stops on its way into the log
HELD_UP = held_up("NEW.event_type = 'loop.shard.done' AND NEW.current_index = 1")


@pytest.fixture
def claims(engine: Engine) -> Claims:
    return Claims(engine.runtime.pool, 300.0)


async def execution_of(engine: Engine) -> int:
    return (await engine.lifecycle.create(playbook(TEXT))).id


async def enqueue(
    engine: Engine,
    execution_id: int,
    count: int,
    *,
    start: int = 0,
    kind: str = "noop",
    priority: int = 0,
    weight: float = 1.0,
    pool: str = "default",
) -> list[Command]:
    """Issues commands of a fan-out and puts them into the queue."""
    runtime = engine.runtime
    commands = [
        Command(
            execution_id,
            "work",
            index=index,
            item=index,
            loop_id=f"{kind}{priority}",
            shard=True,
        )
        for index in range(start, start + count)
    ]
    await runtime.log.append([runtime.commands.issued(command, kind) for command in commands])
    columns: list[Sequence[Any]] = [
        [command.command_id for command in commands],
        [own_context(command, item=command.item) for command in commands],
        [1] * count,
        [execution_id],
        ["work"],
        [kind],
        [3],
        [priority],
        [weight],
        [pool],
        [Shared.of(commands[0]).context()],
    ]
    await runtime.pool.fetch(queries.ENQUEUE, *columns)
    return commands


def names(granted: Sequence[ClaimRow]) -> list[str]:
    return [one["command_id"] for group in granted for one in orjson.loads(group.answer)["commands"]]


async def test_an_answer_holds_what_a_worker_needs(engine: Engine, claims: Claims) -> None:
    execution_id = await execution_of(engine)
    commands = await enqueue(engine, execution_id, 3)
    asked = engine.runtime.ids.take(5)
    granted = await claims.claim("w", asked)
    events = await engine.runtime.log.lifecycle(execution_id)
    state = await States(engine.runtime.log).of(execution_id, granted[0].state_version)
    batch = Batch.model_validate_json(claims.answer(granted, {execution_id: state}))
    [group] = batch.groups
    assert (group.execution_id, group.tool_kind, len(batch)) == (execution_id, "noop", 3)
    assert group.shared == {"step": "work", "loop_id": "noop0", "shard": True}
    for command, event_id, (kind, claim, grant) in zip(commands, asked, batch.grants(), strict=False):
        assert (kind, claim, grant.claim) == ("noop", event_id, 1)
        assert grant.context.command(execution_id, grant.context.item) == command
        assert grant.context.meta == command.meta()
    [(told, version, folded)] = batch.execution_states()
    assert (told, version) == (execution_id, group.state_version)
    assert [event.event_id for event in folded] == [event.event_id for event in events]
    rows = await engine.runtime.pool.fetch(
        "SELECT event_id, meta, worker_id, current_index FROM noetl.event WHERE event_type = 'command.claimed' "
        "ORDER BY event_id"
    )
    assert [(row["event_id"], row["worker_id"], row["current_index"]) for row in rows] == [
        (event_id, "w", index) for index, event_id in enumerate(asked[:3])
    ]
    assert all(row["meta"]["waited"] >= 0 and "claim" not in row["meta"] for row in rows)


async def test_the_same_claim_again_has_the_same_answer(engine: Engine, claims: Claims) -> None:
    """The answer was lost, or the request came twice, even at once."""
    await enqueue(engine, await execution_of(engine), 30)
    asked = engine.runtime.ids.take(10)
    first, again = await asyncio.gather(claims.claim("w", asked), claims.claim("w", asked))
    assert names(first) == names(again) == names(await claims.claim("w", asked))
    assert len(names(first)) == 10
    assert await engine.runtime.pool.fetchval(QUEUED) == 20


async def test_the_heartbeats_of_a_second_claim_outlive_the_first(engine: Engine) -> None:
    """A worker may claim a command again, whose claim it has lost, before it has ended the first run."""
    runtime = engine.runtime
    [command] = await enqueue(engine, await execution_of(engine), 1)
    first, second = (replace(command, claim=claim) for claim in runtime.ids.take(2))
    beats = Heartbeats(runtime.buffer, runtime.commands, 0.01)
    runs = [beats.beating(first), beats.beating(second)]
    for run in runs:
        run.__enter__()
    runs[0].__exit__(None, None, None)

    async def has_beaten() -> bool:
        query = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.heartbeat' AND parent_event_id = $1"
        return bool(await runtime.pool.fetchval(query, second.claim))

    await until(has_beaten, "a heartbeat of the second claim")
    runs[1].__exit__(None, None, None)
    await beats.close()


async def test_executions_take_turns(engine: Engine, claims: Claims) -> None:
    """Two commands that come after a thousand others do not wait for them."""
    large, small = await execution_of(engine), await execution_of(engine)
    await enqueue(engine, large, 1_000)
    for _ in range(3):
        await claims.claim("w", engine.runtime.ids.take(100))
    await enqueue(engine, small, 2)
    granted = await claims.claim("w", engine.runtime.ids.take(6))
    assert {one.execution_id: len(one.waited) for one in granted} == {large: 4, small: 2}
    await enqueue(engine, large, 100, start=1_000)  # behind its own
    await enqueue(engine, small, 300, start=2)
    granted = await claims.claim("w", engine.runtime.ids.take(100))
    assert {one.execution_id: len(one.waited) for one in granted} == pytest.approx({large: 50, small: 50}, abs=2)


async def test_an_execution_that_comes_when_the_queue_is_empty_does_not_overtake_for_long(
    engine: Engine, claims: Claims
) -> None:
    first, second = await execution_of(engine), await execution_of(engine)
    await enqueue(engine, first, 200)
    await claims.claim("w", engine.runtime.ids.take(200))
    await enqueue(engine, second, 200)
    await enqueue(engine, first, 200, start=200)
    granted = await claims.claim("w", engine.runtime.ids.take(100))
    assert {one.execution_id: len(one.waited) for one in granted} == pytest.approx({first: 50, second: 50}, abs=2)


async def test_weights_and_priorities(engine: Engine, claims: Claims) -> None:
    light, heavy, urgent = [await execution_of(engine) for _ in range(3)]
    await enqueue(engine, light, 100)
    await enqueue(engine, heavy, 100, weight=3.0)
    await enqueue(engine, urgent, 10, priority=1)
    granted = await claims.claim("w", engine.runtime.ids.take(50))
    assert {one.execution_id: len(one.waited) for one in granted} == {urgent: 10, heavy: 30, light: 10}


async def test_a_worker_gets_no_more_of_a_kind_than_it_has_places_for(engine: Engine, claims: Claims) -> None:
    execution_id = await execution_of(engine)
    await enqueue(engine, execution_id, 20, kind="postgres")
    await enqueue(engine, execution_id, 20, start=20, kind="http", priority=-1)
    take = engine.runtime.ids.take
    granted = await claims.claim("w", take(10), {"postgres": 2, "spark": 1})
    assert {one.tool_kind: len(one.waited) for one in granted} == {"postgres": 2, "http": 8}
    granted = await claims.claim("w", take(10), {"postgres": 0})
    assert {one.tool_kind: len(one.waited) for one in granted} == {"http": 10}
    granted = await claims.claim("w", take(10))
    assert {one.tool_kind: len(one.waited) for one in granted} == {"postgres": 10}


async def test_commands_with_one_chance_left_are_claimed_one_at_a_time(engine: Engine, claims: Claims) -> None:
    """One of them may be what ended the workers that had them all: it must not fail the others."""
    execution_id = await execution_of(engine)
    await enqueue(engine, execution_id, 10)
    pool, ids = engine.runtime.pool, engine.runtime.ids
    await pool.execute("UPDATE noetl.queue SET attempts = 2 WHERE command_id NOT LIKE '%:9:1'")
    sizes = [len(names(await claims.claim("w", ids.take(20)))) for _ in range(10)]
    assert sizes == [2, 1, 1, 1, 1, 1, 1, 1, 1, 0]


async def test_claims_of_many_workers_share_a_statement(engine: Engine, claims: Claims) -> None:
    first, second = await execution_of(engine), await execution_of(engine)
    for execution_id in (first, second):
        await enqueue(engine, execution_id, 20)
    ids, pool = engine.runtime.ids, engine.runtime.pool
    asked = {f"w{number}": ids.take(1 + number % 3) for number in range(12)}
    answers = await asyncio.gather(*(claims.claim(name, given) for name, given in asked.items()))
    taken = dict(zip(asked, map(names, answers), strict=True))
    assert {name: len(found) for name, found in taken.items()} == {name: len(given) for name, given in asked.items()}
    every = [command for found in taken.values() for command in found]
    assert len(set(every)) == len(every) == 24
    assert 11 <= sum(command.startswith(f"{first}:") for command in every) <= 13, "in turn"
    rows = await pool.fetch("SELECT * FROM noetl.event WHERE event_type = 'command.claimed'")
    assert {row["event_id"]: row["worker_id"] for row in rows} == {
        event_id: name for name, given in asked.items() for event_id in given
    }
    assert len({row["xact_id"] for row in rows}) == 1
    # the same claims again, beside others
    others = {f"other{number}": ids.take(2) for number in range(5)}
    again = dict([*asked.items()][3:9]) | others
    answers = await asyncio.gather(*(claims.claim(name, given) for name, given in again.items()))
    found = dict(zip(again, map(names, answers), strict=True))
    assert all(sorted(found[name]) == sorted(taken[name]) for name in again if name in taken)
    assert len({command for name in others for command in found[name]} - set(every)) == 10


async def test_ids_serve_once_among_other_claims(engine: Engine, claims: Claims) -> None:
    """Those of a claim whose commands have ended, of another worker, or of another claim in the same statement."""
    execution_id = await execution_of(engine)
    commands = await enqueue(engine, execution_id, 2)
    await enqueue(engine, execution_id, 20, start=2, priority=-1)
    runtime = engine.runtime
    used, shared = runtime.ids.take(2), runtime.ids.take(2)
    await claims.claim("w", used)
    ends = [runtime.commands.ended(command, Outcome({"status": "ok", "data": 1})) for command in commands]
    await EventHandler(runtime.log, 300.0).handle_events(ends)
    given = {"w": used, "thief": used, "first": shared, "second": shared, "else": runtime.ids.take(3)}
    answers = await asyncio.gather(*(claims.claim(name, ids) for name, ids in given.items()))
    sizes = dict(zip(given, (len(names(answer)) for answer in answers), strict=True))
    assert sizes == {"w": 0, "thief": 0, "first": 2, "second": 0, "else": 3}
    assert await runtime.pool.fetchval(QUEUED) == 15


async def test_a_claim_that_the_database_refuses_fails_alone(engine: Engine, claims: Claims) -> None:
    await enqueue(engine, await execution_of(engine), 5)
    ids = engine.runtime.ids
    good, bad = await asyncio.gather(claims.claim("w", ids.take(2)), claims.claim("x", [2**70]), return_exceptions=True)
    assert not isinstance(good, BaseException)
    assert len(names(good)) == 2
    assert isinstance(bad, asyncpg.DataError)


async def test_a_cancellation_that_takes_long_keeps_nothing_from_the_others(engine: Engine, claims: Claims) -> None:
    """Its commands go first, and one of them is just being ended by somebody who takes his time."""
    large, other = await execution_of(engine), await execution_of(engine)
    first, *_ = await enqueue(engine, large, 50, priority=1)
    await enqueue(engine, other, 4)
    runtime = engine.runtime
    assert names(await claims.claim("w", runtime.ids.take(1))) == [first.command_id]

    async with runtime.pool.acquire() as connection:
        ending = connection.transaction()
        await ending.start()
        await runtime.log.append([runtime.commands.cancelled(first, "slowly")], connection=connection)
        cancelling = asyncio.create_task(engine.lifecycle.cancel(large))
        await until(lambda: runtime.pool.fetchval(WAITS), "the cancellation to wait for that end")
        granted = await claims.claim("w", runtime.ids.take(4))
        assert {one.execution_id: len(one.waited) for one in granted} == {other: 4}
        await ending.rollback()
    assert await cancelling


async def test_who_ends_commands_and_who_cancels_do_not_wait_for_each_other(engine: Engine, claims: Claims) -> None:
    """Both take the command out of the queue first; the one that comes second waits for the other, and finds it done."""
    execution_id = await execution_of(engine)
    runtime = engine.runtime
    commands = await enqueue(engine, execution_id, 2)
    assert len(names(await claims.claim("w", runtime.ids.take(2)))) == 2
    ends = [runtime.commands.ended(command, Outcome({"status": "ok", "data": 1})) for command in commands]
    await runtime.pool.execute(HELD_UP)
    async with runtime.pool.acquire() as holder:
        await holder.execute("SELECT pg_advisory_lock(1, 1)")
        ending = asyncio.create_task(EventHandler(runtime.log, 300.0).handle_events(ends))
        await until(lambda: runtime.pool.fetchval(WAITS), "the first end to be in the log, and the second not yet")
        cancelling = asyncio.create_task(engine.lifecycle.cancel(execution_id))
        await until(lambda: twice_waiting(runtime.pool), "the cancellation to wait for the ends")
        await asyncio.sleep(1.2)  # it looks for a deadlock after a second; the next one would be the victim
        await holder.execute("SELECT pg_advisory_unlock(1, 1)")
    assert await ending == {event.event_id for event in ends}, "neither was the victim of a deadlock"
    assert await cancelling


async def twice_waiting(pool: asyncpg.Pool) -> bool:
    return int(await pool.fetchval(WAITS)) == 2


async def test_a_kind_with_few_places_does_not_rest_beside_short_commands(engine: Engine) -> None:
    """While others are claimed ahead no slot is free, and there is room for a bounded kind all the same."""
    execution_id = await execution_of(engine)
    runtime = engine.runtime
    await enqueue(engine, execution_id, 400)
    await enqueue(engine, execution_id, 4, start=400, kind="postgres", priority=1)

    async def nobody(commands: int) -> None: ...

    control = DirectControl(runtime.log, 300.0, nobody)
    executions = Executions(runtime, control)
    claimer = Claimer(control, runtime.ids, "w", 2, executions, limits={"postgres": 1}, interval=1_000.0)
    claimer.open()
    kinds: list[str] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(kinds) < 404:
            claimed = await claimer.next()
            kinds.append(claimed.tool_kind)
            await asyncio.sleep(0.001)
            claimer.ended(claimed, 0.001)
    await claimer.close()
    assert kinds.count("postgres") == 4
    last = max(place for place, kind in enumerate(kinds) if kind == "postgres")
    assert last < 390, "it did not wait until the others were done"
