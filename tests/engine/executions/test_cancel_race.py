"""After ``execution.cancelled`` is committed nothing is issued, queued or claimed, whoever was about to."""

from __future__ import annotations

import asyncio

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionCancelledError, ExecutionStateError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.runner import Call
from tests.playbooks import playbook

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


async def test_a_command_that_slipped_past_its_claim_leaves_nothing_in_its_sink(engine: Engine) -> None:
    """Its driver has not been told of the cancellation yet, and runs it to its end."""
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
