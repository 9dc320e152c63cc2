"""A cancellation reaches commands that worker processes have claimed, in whatever language they are written."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool_worker.conftest import Spawn, control_plane
from tests.waiting import ended, until

LOOP = """
workload: {folder: ""}
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: "{{ range(6) | list }}", iterator: n, mode: parallel, max_in_flight: 6}
    tool: {kind: shell, command: "echo $$ > {{ folder }}/{{ n }}.pid; exec sleep 600"}
    next: [after]
  - {step: after, spec: {dispatch: workers}, tool: {kind: noop}}
"""
SMALL = "workflow: [{step: start, spec: {dispatch: workers}, tool: {kind: noop}}]"


def pids(folder: Path) -> list[int]:
    """Of the commands that run, as they have written them."""
    texts = [path.read_text().strip() for path in folder.glob("*.pid")]
    return [int(text) for text in texts if text]


async def counts(engine: Engine, execution_id: int) -> Counter[str]:
    query = "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1"
    return Counter(dict(await engine.runtime.pool.fetch(query, execution_id)))


@pytest.mark.parametrize("transport", [EventTransport.NATS, EventTransport.DIRECT])
async def test_a_worker_stops_what_it_runs_and_is_free_again(
    settings: Settings, spawn: Spawn, tmp_path: Path, transport: EventTransport
) -> None:
    async with control_plane(settings, transport) as own:
        engine = await Engine.open(own)
        spawn("w1", "--slots", "2", event_transport=transport, server_url=own.server_url)
        execution = await engine.lifecycle.create(playbook(LOOP), {"folder": str(tmp_path)})
        driving = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
        await until(lambda: len(pids(tmp_path)) == 2, "two commands that run")
        running = pids(tmp_path)

        assert await engine.lifecycle.cancel(execution.id, "enough")
        with pytest.raises(ExecutionCancelledError, match="enough"):
            await driving
        await until(lambda: all(ended(pid) for pid in running), "the end of what the worker ran")
        state = await engine.run(playbook(SMALL))  # one of the two slots takes it
        assert state.status is ExecutionStatus.COMPLETED, state.error

        found = await counts(engine, execution.id)
        assert pids(tmp_path) == running, "nothing else was begun"
        assert found["command.issued"] == 6
        assert found["command.claimed"] == found["command.failed"] == 2
        assert found["execution.cancelled"] == 1
        assert not found["command.completed"] + found["loop.done"] + found["step.exit"]
        failed = await engine.runtime.pool.fetch(
            "SELECT worker_id, result #>> '{context,error,kind}' AS kind, error FROM noetl.event "
            "WHERE execution_id = $1 AND event_type = 'command.failed'",
            execution.id,
        )
        assert {(row["worker_id"], row["kind"]) for row in failed} == {("w1", "cancelled")}
        assert all("enough" in row["error"] for row in failed)
        await engine.close()
