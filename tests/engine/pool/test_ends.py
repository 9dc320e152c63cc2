"""Ends of commands that ran elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.ends import CommandEnds
from noetl_dagster.worker.command import Command, Outcome
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS

TEXT = "workflow: [{step: work, tool: {kind: noop}}]"


@pytest.mark.parametrize(
    ("result", "context"),
    [
        ({"status": "ok", "reference": {}}, None),
        ({"status": "ok", "context": "words"}, None),
        ({"status": "ok"}, {"patches": [1]}),
    ],
)
async def test_an_end_that_cannot_be_read_fails_its_command_alone(
    engine: Engine, result: dict[str, Any], context: dict[str, Any] | None
) -> None:
    """Workers of others write them; whoever waits for the others goes on."""
    runtime = engine.runtime
    execution = await engine.lifecycle.create(playbook(TEXT))
    bad, good = [Command(execution.id, "work", index=index, loop_id="1") for index in range(2)]
    ends = CommandEnds(runtime.pool, engine.liveness)
    await ends.open()
    waiting = [ends.expect(execution.id, command.command_id) for command in (bad, good)]
    events = [runtime.commands.ended(command, Outcome({"status": "ok", "data": 1})) for command in (bad, good)]
    events[0].result, events[0].context = result, context
    await runtime.log.append(events)
    ends.check(command.command_id for command in (bad, good))
    async with asyncio.timeout(PATIENCE_SECONDS):
        outcomes = await asyncio.gather(*waiting)
    await ends.close()
    assert outcomes[0].envelope["error"]["code"] == "END_UNREADABLE"
    assert (outcomes[1].failed, outcomes[1].envelope["data"]) == (False, 1)


async def test_a_look_that_the_log_refuses_ends_who_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = engine.runtime
    execution = await engine.lifecycle.create(playbook(TEXT))
    ends = CommandEnds(runtime.pool, engine.liveness)
    await ends.open()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with monkeypatch.context() as faulty:
            faulty.setattr("noetl_dagster.engine.pool.ends.COMMAND_ENDS", "SELECT nothing, $1::bigint[], $2::text[]")
            refused = ends.expect(execution.id, "a")
            ends.check(["a"])
            with pytest.raises(asyncpg.UndefinedColumnError):
                await refused
        command = Command(execution.id, "work")
        done = ends.expect(execution.id, command.command_id)
        await runtime.log.append([runtime.commands.ended(command, Outcome({"status": "ok", "data": 1}))])
        ends.check([command.command_id])
        assert (await done).envelope["data"] == 1, "it goes on"
    await ends.close()
