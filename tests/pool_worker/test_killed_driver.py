"""The process that drives a fan-out over the pool is killed: its workers go on, and the next driver takes over."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.drivers import drive
from tests.ledger import lines, written_by
from tests.playbooks import playbook
from tests.pool_worker.conftest import Spawn, control_plane
from tests.waiting import PATIENCE_SECONDS, until

ITEMS = 40
FANOUT = """
workload: {ledger: ""}
workflow:
  - step: fan
    loop: {in: "{{ range(40) | list }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: workers, max_groups: 2, max_concurrent: 12}}
    tool: TOOL
    next: [total]
  - step: total
    tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = sum(items)"}
""".replace("TOOL", written_by("n % 20 >= 10"))  # half of a group waits until the first driver is dead
EVENTS = "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1"
DONE = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.shard.done'"
TOTAL = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'total'"


@pytest.mark.parametrize(
    "transport",
    [
        EventTransport.DIRECT,
        # events that the dead driver had taken from the stream come again after half a minute
        pytest.param(EventTransport.NATS, marks=pytest.mark.slow),
    ],
)
async def test_nothing_is_lost_and_nothing_runs_twice(
    settings: Settings, spawn: Spawn, tmp_path: Path, transport: EventTransport
) -> None:
    async with control_plane(settings, transport) as own:
        engine = await Engine.open(own)
        pool, ledger = engine.runtime.pool, tmp_path / "ledger.txt"
        created = await engine.lifecycle.create(playbook(FANOUT), {"ledger": str(ledger)})
        for name in ("w1", "w2"):
            spawn(name, "--slots", "3", event_transport=transport, server_url=own.server_url)

        async def some_are_done() -> bool:
            return int(await pool.fetchval(DONE, created.id)) >= 6

        async def nobody_drives() -> bool:
            return not await engine.liveness.is_driven(created.id)

        said = tmp_path / "said.txt"
        first = drive(embedded.environment(own), created.id, said)
        try:
            await until(some_are_done, "shards that are done")
        finally:
            first.kill()
            first.join()
        assert first.exitcode == -9
        begun = len(lines(ledger))
        assert 6 <= begun < ITEMS, "it was killed in the middle"
        await until(nobody_drives, "word of the driver's death")
        (tmp_path / "go").touch()

        second = drive(embedded.environment(own), created.id, said)
        try:
            await asyncio.to_thread(second.join, 4 * PATIENCE_SECONDS)
        finally:
            second.kill()
        assert said.read_text() == "COMPLETED None"

        found = Counter(dict(await pool.fetch(EVENTS, created.id)))
        assert Counter(n for n, _ in lines(ledger)) == Counter(range(ITEMS))
        assert await pool.fetchval(TOTAL) == sum(range(ITEMS))
        assert found["command.issued"] == found["command.claimed"] == ITEMS + 1  # with that of the last step
        assert found["loop.shard.enqueued"] == found["loop.shard.done"] == ITEMS
        assert found["loop.fanin.completed"] == found["playbook.completed"] == 1
        assert not found["loop.shard.failed"] + found["command.failed"]
        assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0
        await engine.close()
