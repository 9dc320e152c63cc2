"""A cancellation reaches commands that worker processes have claimed, in whatever language they are written."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool_worker.conftest import Spawn, control_plane
from tests.service.conftest import serving
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
LATCH = """
workload: {folder: ""}
workflow:
  - step: start
    spec: {dispatch: workers}
    tool:
      kind: shell
      command: "echo $$ > {{ folder }}/latch.pid; while [ ! -e {{ folder }}/go ]; do sleep 0.05; done; echo gone"
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


async def test_a_resumed_execution_waits_for_the_command_that_still_runs(
    settings: Settings, spawn: Spawn, tmp_path: Path
) -> None:
    """The driver is gone, the worker is not: its command goes on, and its end serves the new driver."""
    engine, other = await Engine.open(settings), await Engine.open(settings)
    spawn("w1", "--slots", "1", event_transport=EventTransport.DIRECT)
    execution = await engine.lifecycle.create(playbook(LATCH), {"folder": str(tmp_path)})
    driving = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    [running] = await until(lambda: pids(tmp_path), "the command that runs")
    driving.cancel()
    await asyncio.wait([driving])
    await engine.close()

    resumed = await other.lifecycle.resume(execution.id)
    work = asyncio.create_task(other.guard(resumed, other.walker.run(resumed)))
    entered = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'step.enter'"
    await until(lambda: _equals(other, entered, execution.id, 2), "the new driver")
    assert not ended(running)
    (tmp_path / "go").touch()
    assert await work is ExecutionStatus.COMPLETED
    assert "gone" in str(resumed.state.latest["start"].envelope["data"])
    found = await counts(other, execution.id)
    assert found["command.issued"] == found["command.claimed"] == found["command.completed"] == 1
    await other.close()


async def _equals(engine: Engine, query: str, execution_id: int, wanted: int) -> bool:
    return bool(await engine.runtime.pool.fetchval(query, execution_id) == wanted)


async def test_a_worker_that_only_knows_the_protocol_hears_of_it(settings: Settings) -> None:
    """It asks for its command, as docs/reference/worker-protocol.md says: 404 means that it has ended."""
    async with serving(settings) as service:
        engine = await Engine.open(service.settings)
        execution = await engine.lifecycle.create(playbook(SMALL))
        driving = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
        command_id = f"{execution.id}:start:1:1"
        claim: dict[str, Any] = {"worker_id": "foreign", "event_ids": ["77"], "command_ids": [command_id]}

        async def granted() -> bool:
            answer = await service.client.post("/api/commands/claim", json=claim)
            return bool(answer.json()["groups"])

        await until(granted, "a claim")
        assert (await service.client.get(f"/api/commands/{command_id}")).status_code == 200
        answer = await service.client.post(f"/api/executions/{execution.id}/cancel", json={"reason": "enough"})
        assert answer.json()["cancelled"]
        assert (await service.client.get(f"/api/commands/{command_id}")).status_code == 404
        with pytest.raises(ExecutionCancelledError):
            await driving

        late = {
            "execution_id": str(execution.id),
            "event_id": "78",
            "event_type": "command.completed",
            "payload": {"node_name": "start", "status": "COMPLETED", "result": {"status": "ok", "data": 1}},
            "meta": {"command_id": command_id, "visit": 1, "attempt": 1},
            "worker_id": "foreign",
        }
        assert (await service.client.post("/api/events", json=late)).status_code == 409
        found = await counts(engine, execution.id)
        assert (found["command.failed"], found["command.completed"]) == (1, 0)
        await engine.close()
