"""Three real worker processes of different capacity over HTTP and NATS; one is killed, one is stopped."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool_worker.conftest import Spawn, soon_missed
from tests.service.conftest import serving
from tests.waiting import PATIENCE_SECONDS, until

LOOP = """
workload: {count: 40, gate: ""}
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: "{{ range(count) | list }}", iterator: n, mode: parallel, max_in_flight: 40}
    tool:
      kind: python
      input: {n: "{{ n }}", gate: "{{ gate }}"}
      code: |
        import pathlib, time
        while gate and not pathlib.Path(gate).exists():
            time.sleep(0.02)
        time.sleep(0.05)
        result = n
    next: [end]
  - step: end
    tool: {kind: python, input: {found: "{{ start.results }}"}, code: "result = sorted(found)"}
"""


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return soon_missed(settings)


async def listed(engine: Engine, count: int) -> None:
    """Waits until so many workers have reported."""
    ready = "SELECT count(*) >= $1 FROM noetl.runtime WHERE status = 'ready'"
    await until(lambda: engine.runtime.pool.fetchval(ready, count))


async def all_busy(engine: Engine, earlier: int) -> bool:
    """Whether all the slots of all the workers have a command of an execution later than this."""
    newest = await engine.runtime.pool.fetchval("SELECT max(execution_id) FROM noetl.event")
    claims = await claimed(engine, newest)
    return newest > earlier and claims == {"small": 1, "middle": 3, "large": 8}


async def test_three_processes_one_killed(settings: Settings, spawn: Spawn, tmp_path: Path) -> None:
    nats = settings.model_copy(update={"event_transport": EventTransport.NATS})
    async with serving(nats) as service:
        engine = await Engine.open(service.settings)
        processes = {
            name: spawn(name, "--slots", str(slots), event_transport=EventTransport.NATS, server_url=service.url)
            for name, slots in (("small", 1), ("middle", 3), ("large", 8))
        }
        await listed(engine, 3)
        state = await engine.run(playbook(LOOP))
        assert state.status is ExecutionStatus.COMPLETED, state.error
        assert state.latest["end"].envelope["data"] == list(range(40))
        claims = await claimed(engine, state.execution_id)
        assert claims["large"] > claims["small"] > 0, claims
        assert await times_claimed(engine, state.execution_id) == Counter(range(40))

        gate = tmp_path / "gate"
        running = asyncio.create_task(engine.run(playbook(LOOP), {"gate": str(gate)}))
        await until(lambda: all_busy(engine, state.execution_id), "commands that wait at the gate")
        newest = await engine.runtime.pool.fetchval("SELECT max(execution_id) FROM noetl.event")
        lost = set(await times_claimed(engine, newest, worker="large"))
        processes["large"].kill()  # in the middle of eight commands, and with more on their way to it
        processes["small"].send_signal(signal.SIGTERM)  # ends what it runs, and goes
        gate.touch()
        state = await asyncio.wait_for(running, PATIENCE_SECONDS)
        assert state.status is ExecutionStatus.COMPLETED, state.error
        assert state.latest["end"].envelope["data"] == list(range(40))
        ends = await engine.runtime.pool.fetchval(
            "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'",
            state.execution_id,
        )
        assert ends == 41
        assert await asyncio.to_thread(processes["small"].wait, PATIENCE_SECONDS) == 0
        assert await times_claimed(engine, state.execution_id) == Counter(range(40))
        again = await times_claimed(engine, state.execution_id, again=True)
        assert len(lost) == 8
        assert lost <= set(again), "the killed worker's commands were claimed again"
        statuses = dict(await engine.runtime.pool.fetch("SELECT worker_id, status FROM noetl.runtime"))
        assert statuses["small"] == "stopped"
        processes["middle"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(processes["middle"].wait, PATIENCE_SECONDS) == 0
        await engine.close()


async def claimed(engine: Engine, execution_id: int) -> Counter[str]:
    """Claims by worker process; those of steps that run in the op are left out."""
    rows = await engine.runtime.pool.fetch(
        "SELECT worker_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed' "
        "AND worker_id = ANY($2)",
        execution_id,
        ["small", "middle", "large"],
    )
    return Counter(row["worker_id"] for row in rows)


async def times_claimed(
    engine: Engine, execution_id: int, *, again: bool = False, worker: str | None = None
) -> Counter[int]:
    """How often each iteration was claimed for the first time or, ``again``, from a worker that was gone.

    A starved worker of a busy machine counts as gone too; each further claim has its number.
    """
    rows = await engine.runtime.pool.fetch(
        "SELECT current_index FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed' "
        "AND current_index IS NOT NULL AND meta ? 'claim' = $2 AND ($3::text IS NULL OR worker_id = $3)",
        execution_id,
        again,
        worker,
    )
    return Counter(row["current_index"] for row in rows)
