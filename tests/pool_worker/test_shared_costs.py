"""What commands share is paid once: states, programs, heartbeats. What the log cannot take is not begun."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from tests.ledger import lines
from tests.playbooks import playbook
from tests.pool import working
from tests.service.conftest import samples, serving
from tests.waiting import PATIENCE_SECONDS, until
from tests.whole import Fan, held_up, warm

BEATS = """
SELECT count(*) AS beats, count(DISTINCT meta ->> 'command_id') AS commands, count(DISTINCT xact_id) AS commits
FROM noetl.event WHERE event_type = 'command.heartbeat'
"""
COMMITS = "SELECT count(DISTINCT xact_id) FROM noetl.event WHERE event_type = 'loop.shard.done'"
BOUND = 6
BOUNDED = f"""
workload: {{ledger: ""}}
workflow:
  - step: fan
    loop: {{in: "{{{{ range(24) | list }}}}", iterator: n}}
    spec: {{loop_mode: fanout, fanout: {{engine: workers, max_groups: 1, max_concurrent: {BOUND}}}}}
    tool:
      kind: python
      input: {{n: "{{{{ n }}}}", ledger: "{{{{ ledger }}}}"}}
      code: |
        import os
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{{n}} {{os.getpid()}}\\n".encode())
        os.close(descriptor)
"""
HELD_UP = held_up("NEW.event_type = 'loop.shard.done'")


async def test_states_and_programs_are_fetched_once_a_worker(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, event_transport=EventTransport.NATS) as service:
        engine = await Engine.open(service.settings)
        async with (
            working(service.settings, "w1", worker_slots=8),
            working(service.settings, "w2", worker_slots=8),
        ):
            fan = await Fan.start(engine, tmp_path, 120)
            await fan.is_whole()
        await engine.close()
        asked: Counter[str] = Counter()
        for (name, *labels), value in samples((await service.client.get("/metrics")).text).items():
            if name == "noetl_http_requests_total":
                asked[dict(labels)["route"]] += int(value)
        states = [route for route in asked if route.endswith("/lifecycle")]
        assert not states, "they come with the claims"
        programs = sum(count for route, count in asked.items() if route.startswith("/api/catalog"))
        assert 1 <= programs <= 2, "one for each worker that had some of the shards"


async def test_heartbeats_of_a_worker_travel_together(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, event_transport=EventTransport.NATS) as service:
        engine = await Engine.open(service.settings)
        pool = engine.runtime.pool
        async with working(service.settings, "w", worker_slots=12, command_heartbeat_seconds=0.2):
            fan = await Fan.start(engine, tmp_path, 12, held=12)

            async def several() -> bool:
                row = await pool.fetchrow(BEATS)
                return bool(row["commands"] == 12 and row["beats"] >= 36)

            await until(several, "heartbeats of all")
            row = await pool.fetchrow(BEATS)
            assert row["commits"] <= row["beats"] / 3, dict(row)
            fan.go()
            await fan.is_whole()
        await engine.close()


@pytest.mark.parametrize("transport", [EventTransport.NATS, EventTransport.DIRECT])
async def test_ends_wait_for_company_only_while_commands_wait_for_a_slot(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: EventTransport
) -> None:
    """A worker that has nothing more to begin sends what it has: nobody waits for the ten minutes."""
    monkeypatch.setattr("noetl_dagster.pool_worker.worker.LINGER_SECONDS", 600.0)
    monkeypatch.setattr("noetl_dagster.pool_worker.claimer.AHEAD_SECONDS", 10.0)  # short on a busy machine too
    async with serving(settings, event_transport=transport) as service:
        engine = await Engine.open(service.settings)
        async with asyncio.timeout(PATIENCE_SECONDS), working(service.settings, "w", worker_slots=3):
            await warm(engine)
            fan = await Fan.start(engine, tmp_path, 100)
            await fan.is_whole()
        commits = await engine.runtime.pool.fetchval(COMMITS)
        assert commits <= 50, "they wait while others wait for a slot"
        await engine.close()


@pytest.mark.parametrize("transport", [EventTransport.NATS, EventTransport.HTTP])
async def test_a_log_that_takes_nothing_holds_up_the_driver(
    settings: Settings, pool: asyncpg.Pool, tmp_path: Path, transport: EventTransport
) -> None:
    """Ends wait for the database: no command is begun beyond those that may be in flight, and none is lost."""
    ledger = tmp_path / "ledger"
    async with serving(settings, event_transport=transport) as service:
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w", worker_slots=16):
            await warm(engine)
            await pool.execute(HELD_UP)
            async with pool.acquire() as holder:
                await holder.execute("SELECT pg_advisory_lock(1, 1)")
                driving = asyncio.create_task(engine.run(playbook(BOUNDED), {"ledger": str(ledger)}))
                await until(lambda: ledger.exists() and len(lines(ledger)) >= BOUND, "the first commands")
                await asyncio.sleep(0.5)
                assert len(lines(ledger)) == BOUND
                await holder.execute("SELECT pg_advisory_unlock(1, 1)")
            state = await driving
        await engine.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert sorted(n for n, _ in lines(ledger)) == list(range(24))
