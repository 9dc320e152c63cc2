"""The page of workers: who is connected, what they run, what waits, and since when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from noetl_dagster.events.transport.capacity import WorkerReport, put_worker
from noetl_dagster.service.pages.workers import MOST_COUNTED, WAITING, PoolQueue, read_workforce, workers_of
from tests.playbooks import playbook
from tests.pool import working
from tests.service.conftest import Service
from tests.service.pages.hostile import HOSTILE
from tests.service.pages.html import Document, page_at
from tests.waiting import until

SLOW = """
workflow:
  - step: slow
    tool: {kind: python, code: "import time; time.sleep(seconds)", input: {seconds: "{{ n }}"}}
    loop: {in: [600, 600, 600], iterator: n, spec: {mode: parallel}}
    spec: {dispatch: workers, pool: slow}
"""

FILL = """
INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, pool, turn, available_at)
SELECT 7, format('%s-%s', $1::text, number), number, 'step', 'noop', $1, number, now() - make_interval(secs => $3)
FROM generate_series(1, $2::int) number
"""


async def test_nobody_works(service: Service) -> None:
    found = await page_at(service.client, "/workers")
    assert "No worker is connected, and no command waits." in found.text
    assert "/workers/now" not in found.links
    answer = await service.client.get("/workers/now")
    assert answer.status_code == 200
    assert "No worker is connected" in Document(answer.text).text


async def test_workers_and_what_they_run(service: Service) -> None:
    engine = service.plane.engine
    async with working(service.settings, "w<1>", worker_pool="slow", worker_slots=2):
        execution = await engine.lifecycle.create(playbook(SLOW, name="slow"))
        driving = asyncio.create_task(engine.drive(execution))

        async def is_busy() -> bool:
            found = await read_workforce(service.plane)
            return len(found.running) == 2 and any(one.commands == 1 for one in found.pools)

        await until(is_busy)
        found = await page_at(service.client, "/workers")
        place = found.cells.index("w<1>")
        assert found.cells[place : place + 3] == ["w<1>", "slow", "ready"]
        links = [link for link in found.links if f"/executions/{execution.id}/steps/slow/" in link]
        assert {link.partition("?")[0][-1] for link in links} <= {"0", "1", "2"}
        assert len(links) == 2
        [queue] = (await read_workforce(service.plane)).pools
        assert (queue.pool, queue.commands, queue.executions, queue.workers, queue.slots) == ("slow", 1, 1, 1, 2)
        assert queue.oldest is not None
        await engine.lifecycle.cancel(execution.id, "enough")
        await driving

    async def is_idle() -> bool:
        return "No worker of a pool runs a command." in (await page_at(service.client, "/workers")).text

    await until(is_idle)  # the tables are kept for a second


async def test_waiting_commands_are_counted_within_a_bound(service: Service) -> None:
    pool = service.plane.engine.runtime.pool
    for name, number, age in (("a", MOST_COUNTED + 5, 60.0), ("b", 3, 5.0), ("c", 1, -900.0)):
        await pool.execute(FILL, name, number, age)
    queues = {one.pool: one for one in (await read_workforce(service.plane)).pools}
    assert {name: (one.commands, one.is_capped, one.later) for name, one in queues.items()} == {
        "a": (MOST_COUNTED, True, 0),
        "b": (3, False, 0),
        "c": (1, False, 1),
    }
    assert queues["a"].oldest == pytest.approx(60, abs=30)
    assert queues["c"].oldest == 0
    plan = "\n".join(row[0] for row in await pool.fetch(f"EXPLAIN {WAITING}"))
    assert "idx_queue_pool_turn" in plan
    assert "Seq Scan on queue" not in plan
    found = await page_at(service.client, "/workers")
    assert f"{MOST_COUNTED:,}+" in found.cells
    assert "no worker of pool b reports" in found.text


async def test_hostile_reports_are_only_text(service: Service) -> None:
    pool = service.plane.engine.runtime.pool
    for number, text in enumerate(HOSTILE):
        name = f"{number}{text[:200]}".replace("\x00", "")
        report = WorkerReport(worker_id=name, tool_pools={text[:60]: 1}, slots=1, meta={"host": text[:3_000]})
        assert await put_worker(pool, report) is None
        await pool.execute(
            "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, worker_id, status, "
            "claim_event_id) VALUES (1, $1, 1, $2, $2, $1, 'leased', 1)",
            name,
            text.replace("\x00", ""),
        )
    found = await page_at(service.client, "/workers")
    assert HOSTILE[0] in found.text
    assert not {"\u202e", "\x1b"} & set(found.text)


def reported(silent: float = 0.0, **changes: Any) -> dict[str, Any]:
    capacity = {"pool": "p", "slots": 4, "available_slots": 3, "active_tasks": 1, "interval": 10.0}
    return {
        **{"worker_id": "w", "status": "ready", "capacity": capacity, "meta": {"host": "h"}},
        **{"silent": silent, **changes},
    }


@pytest.mark.parametrize(
    ("row", "status", "connected"),
    [
        (reported(), "ready", True),
        (reported(29), "ready", True),
        (reported(31), "lost", False),
        (reported(31, status="stopped"), "stopped", False),
        (reported(5, status="draining"), "draining", True),
        (reported(5, capacity={}, meta={}), "ready", True),
    ],
)
def test_a_stored_report(row: dict[str, Any], status: str, connected: bool) -> None:
    [worker] = workers_of([row])
    assert (worker.status, worker.is_connected) == (status, connected)


def test_connected_workers_come_first() -> None:
    both = workers_of([reported(90, worker_id="a"), reported()])
    assert [one.worker_id for one in both] == ["w", "a"]


def test_a_warning_needs_waiting_commands() -> None:
    quiet = PoolQueue("p", 0, 0, None, 0, workers=0, slots=0, free=0)
    assert quiet.warning == ""
