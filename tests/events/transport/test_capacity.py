"""Dispatch picks a worker with room for the tool kind, as the workers' reports say."""

from __future__ import annotations

import asyncpg
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.transport.capacity import CapacityKeeper, CapacityRegistry, WorkerReport, put_worker
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.settings import Settings
from tests.waiting import until


def report(name: str, free: int, **more: object) -> WorkerReport:
    return WorkerReport.model_validate({"worker_id": name, "slots": 8, "available_slots": free, **more})


def test_the_worker_with_most_room_gets_the_command() -> None:
    registry = CapacityRegistry()
    registry.heard(report("small", 1))
    registry.heard(report("large", 3))
    picks = [registry.pick("http") for _ in range(5)]
    assert picks[:2] == ["large", "large"]
    assert sorted(str(pick) for pick in picks[:4]) == ["large", "large", "large", "small"]
    assert picks[4] is None
    registry.heard(report("small", 1))
    assert registry.pick("http") == "small"


def test_a_tool_kind_has_its_own_limit() -> None:
    registry = CapacityRegistry()
    registry.heard(report("w", 8, tool_pools={"spark": 1}))
    assert [registry.pick("spark"), registry.pick("spark"), registry.pick("http")] == ["w", None, "w"]


def test_workers_that_go_get_nothing() -> None:
    registry = CapacityRegistry()
    registry.heard(report("draining", 8, status="draining"))
    registry.heard(report("stopped", 8, status="stopped"))
    registry.heard(report("silent", 8, interval=1))
    registry.workers["silent"].heard -= 10
    assert registry.pick("http") is None
    assert registry.lost() == ["stopped", "silent"]
    assert registry.absent() == ["draining", "stopped", "silent"]


def test_a_worker_known_by_what_it_holds_is_lost_unless_it_reports() -> None:
    registry = CapacityRegistry()
    registry.heard(report("lively", 8))
    for name in ("lively", "mute"):
        registry.expect(name, interval=1)
    assert registry.workers["lively"].free("http") == 8
    assert registry.workers["mute"].free("http") == 0
    assert registry.lost() == []
    registry.workers["mute"].heard -= 10
    assert registry.lost() == ["mute"]
    registry.expect("mute", interval=1)
    assert registry.lost() == ["mute"]


async def test_reports_reach_memory_and_the_runtime_table(
    client: NatsClient, pool: asyncpg.Pool, settings: Settings
) -> None:
    keeper = CapacityKeeper(client, pool, settings)
    await keeper.open()
    subject = Names.of(settings).capacity_of("w.1")
    await client.publish(subject, b"no report")
    await client.publish(subject, report("w.1", 5).model_dump_json().encode())
    capacity = "SELECT capacity FROM noetl.runtime WHERE worker_id = 'w.1'"
    await until(lambda: pool.fetchval(capacity))
    assert keeper.registry.pick("http") == "w.1"
    await keeper.close()


async def test_what_several_processes_hear_is_written_once(pool: asyncpg.Pool) -> None:
    rows = "SELECT ctid::text, status, (capacity ->> 'available_slots')::int FROM noetl.runtime"
    await put_worker(pool, report("w", 5))
    await pool.execute(
        "UPDATE noetl.runtime SET heartbeat = now() + interval '1 hour'"
    )  # just now, on any machine
    first = await pool.fetchrow(rows)
    await put_worker(pool, report("w", 5))
    assert await pool.fetchrow(rows) == first
    await put_worker(pool, report("w", 4))
    assert tuple(await pool.fetchrow(rows))[1:] == ("ready", 4)
    await put_worker(pool, report("w", 4, status="draining"))
    assert tuple(await pool.fetchrow(rows))[1:] == ("draining", 4)
    before = await pool.fetchval(
        "UPDATE noetl.runtime SET heartbeat = now() - interval '2 seconds' RETURNING heartbeat"
    )
    await put_worker(pool, report("w", 4, status="draining"))
    assert await pool.fetchval("SELECT heartbeat FROM noetl.runtime") > before, "it lives"


def test_silence_is_excused_while_nobody_can_be_heard() -> None:
    registry = CapacityRegistry()
    for name in ("patient", "gone", "stopped"):
        registry.heard(report(name, 8, interval=10, status="stopped" if name == "stopped" else "ready"))
    registry.workers["patient"].heard -= 20
    registry.workers["gone"].heard -= 40
    registry.excuse()
    registry.workers["patient"].heard -= 20
    assert registry.lost() == ["gone", "stopped"]


def test_as_many_workers_are_woken_as_have_room_and_some_to_spare() -> None:
    registry = CapacityRegistry()
    for name, free in (("large", 8), ("middle", 4), ("small", 2), ("full", 0)):
        registry.heard(report(name, free, batch=True))
    registry.heard(report("single", 8))
    assert registry.to_wake(1, {"http"}) == ["large", "middle"], "one may be gone"
    assert registry.to_wake(9, {"http"}) == ["large", "middle", "small"]
    assert registry.to_wake(9, {"http"}) == [], "they have them now, so all are told"
    for worker in registry.workers.values():
        worker.woken -= 10
    assert registry.to_wake(9, {"http"}) == ["large", "middle", "small"], "they did not take them"


def test_who_has_no_place_for_a_kind_is_not_woken_for_it() -> None:
    registry = CapacityRegistry()
    registry.heard(report("bounded", 8, batch=True, tool_pools={"postgres": 0}))
    registry.heard(report("other", 2, batch=True))
    assert registry.to_wake(1, {"postgres"}) == ["other"]
    assert registry.to_wake(1, {"postgres", "http"}) == ["bounded", "other"]
