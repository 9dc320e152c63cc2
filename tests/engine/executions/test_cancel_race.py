"""After ``execution.cancelled`` is committed nothing is issued, queued or claimed, whoever was about to."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.errors import ExecutionCancelledError, ExecutionStateError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.transport import queries
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.context import Shared, own_context
from noetl_dagster.worker.runner import Call
from tests.events.conftest import connections
from tests.playbooks import playbook

ISSUERS = 12
CLAIMERS = 6
ROUNDS = pytest.mark.parametrize("rounds", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
COUNT = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = $2"
SINK = """
workflow:
  - step: work
    tool:
      kind: python
      code: "result = {'n': 1}"
      sink: {tool: postgres, auth: pg_local, table: done}
"""
TEXT = "workflow: [{step: work, tool: {kind: noop}}]"


async def counts(connection: Any, execution_id: int) -> tuple[int, int, int]:
    """Commands issued, claimed and queued, as everybody sees them now."""
    issued = await connection.fetchval(COUNT, execution_id, "command.issued")
    claimed = await connection.fetchval(COUNT, execution_id, "command.claimed")
    queued = await connection.fetchval("SELECT count(*) FROM noetl.queue WHERE execution_id = $1", execution_id)
    return issued, claimed, queued


@ROUNDS
async def test_nothing_is_issued_after_the_cancellation(engine: Engine, settings: Settings, rounds: int) -> None:
    """Issuers hold their transactions open for a while: one that could outlive the cancel would be seen."""
    runtime = engine.runtime
    async with connections(settings, ISSUERS) as racers:
        for turn in range(rounds):
            execution = await engine.lifecycle.create(playbook(TEXT))
            barrier = asyncio.Barrier(ISSUERS + 1)

            async def issue(place: int, connection: Any, execution_id=execution.id, barrier=barrier) -> None:
                await barrier.wait()
                for number in range(1_000):
                    size = 1 if place % 3 == 0 else 5
                    events = [
                        runtime.commands.issued(
                            Command(execution_id, "work", attempt=number * 5 + one + 1, index=place), "noop"
                        )
                        for one in range(size)
                    ]
                    try:
                        if place % 3 == 1:  # the pool's connections: COPY
                            await runtime.log.append(events)
                            continue
                        async with connection.transaction():
                            await runtime.log.append(events, connection=connection)
                            await asyncio.sleep(random.uniform(0, 0.01))
                    except ExecutionCancelledError:
                        return
                raise AssertionError("never told of the cancellation")

            async def cancel(execution_id=execution.id, barrier=barrier) -> tuple[int, int, int]:
                await barrier.wait()
                await asyncio.sleep(random.uniform(0, 0.02))
                assert await engine.lifecycle.cancel(execution_id, "enough")
                return await counts(runtime.pool, execution_id)

            at_cancel, *_ = await asyncio.gather(cancel(), *(issue(*one) for one in enumerate(racers)))
            assert await counts(runtime.pool, execution.id) == at_cancel, f"round {turn}"
            assert await runtime.pool.fetchval(COUNT, execution.id, "execution.cancelled") == 1


@ROUNDS
async def test_every_claim_ends_with_the_cancellation_and_none_follows(
    engine: Engine, settings: Settings, rounds: int
) -> None:
    """Dispatchers queue, workers claim and complete; all at once with several that cancel."""
    runtime = engine.runtime
    claims = Claims(runtime.pool, 30.0)
    for turn in range(rounds):
        execution = await engine.lifecycle.create(playbook(TEXT))
        commands = [Command(execution.id, "work", index=index, loop_id="1") for index in range(60)]
        await runtime.log.append([runtime.commands.issued(command, "noop") for command in commands])
        waiting = list(commands)
        random.shuffle(waiting)
        barrier = asyncio.Barrier(CLAIMERS + 4)

        async def queue(commands=commands, barrier=barrier) -> None:
            await barrier.wait()
            for command in commands:
                shared = Shared.of(command).context()
                row = (command.command_id, own_context(command), 1,
                       command.execution_id, "work", "noop", 3, 0, 1.0, "default", shared)  # fmt: skip
                await runtime.pool.fetch(queries.ENQUEUE, *([value] for value in row))

        async def work(waiting=waiting, barrier=barrier) -> None:
            await barrier.wait()
            for command in waiting:
                if command.index is not None and command.index % 2:
                    await claims.claim("w", runtime.ids.take(3))
                    continue
                await claims.claim("w", runtime.ids.take(1), only=[command.command_id])

        async def cancel(execution_id=execution.id, barrier=barrier) -> tuple[bool, tuple[int, int, int]]:
            await barrier.wait()
            await asyncio.sleep(random.uniform(0, 0.05))
            cancelled = await engine.lifecycle.cancel(execution_id, "enough")
            return cancelled, await counts(runtime.pool, execution_id)

        outcomes = await asyncio.gather(*(cancel() for _ in range(3)), queue(), *(work() for _ in range(CLAIMERS)))
        cancelled = [outcome for outcome in outcomes if outcome is not None]
        assert sorted(won for won, _ in cancelled) == [False, False, True], f"round {turn}"
        issued, claimed, queued = await counts(runtime.pool, execution.id)
        assert {seen for _, seen in cancelled} == {(issued, claimed, queued)}
        assert queued == 0
        assert await runtime.pool.fetchval(COUNT, execution.id, "command.failed") == claimed
        assert await runtime.pool.fetchval(COUNT, execution.id, "execution.cancelled") == 1


@ROUNDS
async def test_who_cancels_and_who_resumes_at_once(engine: Engine, settings: Settings, rounds: int) -> None:
    """Whatever comes first: one cancellation, and no epoch after it."""
    other = await Engine.open(settings)
    try:
        for turn in range(rounds):
            execution = await engine.lifecycle.create(playbook(TEXT))
            outcomes = await asyncio.gather(
                engine.lifecycle.resume(execution.id),
                other.lifecycle.cancel(execution.id),
                other.lifecycle.resume(execution.id),
                engine.lifecycle.cancel(execution.id),
                return_exceptions=True,
            )
            refused = [one for one in outcomes if isinstance(one, BaseException)]
            assert all(isinstance(one, ExecutionStateError) for one in refused), refused
            assert sorted((outcomes[1], outcomes[3])) == [False, True], f"round {turn}"
            events = await engine.runtime.log.lifecycle(execution.id)
            order = await engine.runtime.pool.fetch(
                "SELECT event_type FROM noetl.event WHERE execution_id = $1 ORDER BY xact_id, event_id",
                execution.id,
            )
            assert [row["event_type"] for row in order][-1] == "execution.cancelled"
            assert [event.event_type for event in events].count("execution.cancelled") == 1
    finally:
        await other.close()


async def test_a_cancelled_execution_harms_no_other_of_the_same_batch(engine: Engine) -> None:
    """Commands of several executions share a group commit; the cancelled one's are refused alone."""
    runtime = engine.runtime
    buffer = EventBuffer(runtime.log, linger=0.05)
    created = [await engine.lifecycle.create(playbook(TEXT)) for _ in range(3)]
    await engine.lifecycle.cancel(created[1].id)
    outcomes = await asyncio.gather(
        *(
            buffer.append([runtime.commands.issued(Command(one.id, "work", index=index), "noop") for index in range(3)])
            for one in created
        ),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], ExecutionCancelledError)
    assert [len(outcomes[place]) for place in (0, 2)] == [3, 3]  # type: ignore[arg-type]
    assert [await runtime.pool.fetchval(COUNT, one.id, "command.issued") for one in created] == [3, 0, 3]


async def test_a_command_that_slipped_past_its_claim_leaves_nothing_in_its_sink(settings: Settings) -> None:
    """Its driver has not been told of the cancellation yet, and runs it to its end."""
    engine = await Engine.open(settings.model_copy(update={"default_postgres_credential": "embedded"}))
    runtime = engine.runtime
    await runtime.pool.execute("CREATE TABLE done (n int)")
    execution = await engine.lifecycle.create(playbook(SINK))
    command = Command(execution.id, "work")
    await runtime.log.append([runtime.commands.issued(command, "python")])
    assert await engine.lifecycle.cancel(execution.id)
    outcome = await runtime.runner.run(Call(execution.visit("work"), command))
    await runtime.buffer.flush()
    assert outcome.failed
    assert await runtime.pool.fetchval("SELECT count(*) FROM done") == 0
    assert await runtime.pool.fetchval(COUNT, execution.id, "command.completed") == 0
    await engine.close()
