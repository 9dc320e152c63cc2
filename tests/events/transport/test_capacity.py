"""Dispatch tells workers with capacity for the tool kind, according to their reports."""

from __future__ import annotations

import asyncpg
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.transport.capacity import (
    CapacityListener,
    CapacityRegistry,
    WorkerReport,
    put_worker,
)
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.settings import Settings
from tests.waiting import until


def report(name: str, free: int, **more: object) -> WorkerReport:
    return WorkerReport.model_validate({"worker_id": name, "slots": 8, "available_slots": free, **more})


def test_the_workers_with_most_capacity_are_told_first() -> None:
    registry = CapacityRegistry()
    registry.heard(report("small", 1))
    registry.heard(report("large", 3))
    assert registry.targets(2, {"http"}) == ["large", "small"]
    assert registry.targets(1, {"http"}) == ["large"], "the small one has been told of its command"
    assert registry.targets(1, {"http"}) == [], "now all are told"
    registry.heard(report("small", 1))
    assert registry.targets(1, {"http"}) == ["small"]


def test_a_tool_kind_has_its_own_limit() -> None:
    registry = CapacityRegistry()
    registry.heard(report("w", 8, tool_pools={"spark": 1}))
    assert [registry.targets(count, {"spark"}) for count in (2, 1)] == [[], ["w"]]
    assert registry.targets(7, {"http"}) == ["w"]


def test_workers_that_go_get_nothing() -> None:
    registry = CapacityRegistry()
    registry.heard(report("draining", 8, status="draining"))
    registry.heard(report("stopped", 8, status="stopped"))
    registry.heard(report("silent", 8, interval=1))
    registry.workers["default", "silent"].heard -= 10
    assert registry.targets(1, {"http"}) == []
    assert registry.lost() == [("stopped", "default"), ("silent", "default")]


def test_a_worker_known_by_what_it_holds_is_lost_unless_it_reports() -> None:
    registry = CapacityRegistry()
    registry.heard(report("lively", 8))
    for name in ("lively", "mute"):
        registry.expect(name, interval=1)
    assert registry.workers["default", "lively"].free("http") == 8
    assert registry.workers["default", "mute"].free("http") == 0
    assert registry.lost() == []
    registry.workers["default", "mute"].heard -= 10
    assert registry.lost() == [("mute", "default")]
    registry.expect("mute", interval=1)
    assert registry.lost() == [("mute", "default")]


async def test_reports_reach_memory_and_the_runtime_table(
    client: NatsClient, pool: asyncpg.Pool, settings: Settings
) -> None:
    keeper = CapacityListener(client, pool)
    await keeper.open()
    subject = NatsNames(settings).capacity_of("default", "w.1")
    await client.publish(subject, b"no report")
    await client.publish(subject, report("w.1", 5).model_dump_json().encode())
    capacity = "SELECT capacity FROM noetl.runtime WHERE worker_id = 'w.1'"
    await until(lambda: pool.fetchval(capacity))
    assert keeper.registry.targets(1, {"http"}) == ["w.1"]
    await keeper.close()


async def test_what_several_processes_hear_is_written_once(pool: asyncpg.Pool) -> None:
    rows = "SELECT ctid::text, status, (capacity ->> 'available_slots')::int FROM noetl.runtime"
    await put_worker(pool, report("w", 5))
    await pool.execute("UPDATE noetl.runtime SET heartbeat = now() + interval '1 hour'")  # just now, on any machine
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
    registry.workers["default", "patient"].heard -= 20
    registry.workers["default", "gone"].heard -= 40
    registry.excuse()
    registry.workers["default", "patient"].heard -= 20
    assert registry.lost() == [("gone", "default"), ("stopped", "default")]


def test_as_many_workers_are_told_as_have_capacity_and_some_to_spare() -> None:
    registry = CapacityRegistry()
    for name, free in (("large", 8), ("middle", 4), ("small", 2), ("full", 0)):
        registry.heard(report(name, free))
    assert registry.targets(1, {"http"}) == ["large", "middle"], "one may be gone"
    assert registry.targets(9, {"http"}) == ["large", "middle", "small"]
    assert registry.targets(9, {"http"}) == [], "they have been told, so all are told"
    for worker in registry.workers.values():
        worker.targeted_at -= 10
    assert registry.targets(9, {"http"}) == ["large", "middle", "small"], "they did not claim them"


def test_workers_without_slots_for_a_kind_are_not_told_of_it() -> None:
    registry = CapacityRegistry()
    registry.heard(report("bounded", 8, tool_pools={"postgres": 0}))
    registry.heard(report("other", 2))
    assert registry.targets(1, {"postgres"}) == ["other"]
    assert registry.targets(1, {"postgres", "http"}) == ["bounded", "other"]
