"""Commands at once by tool kind: what a worker was told holds at every moment, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.pool_worker.worker import PoolWorker
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool import working
from tests.pool_worker.conftest import control_plane
from tests.waiting import PATIENCE_SECONDS
from tests.whole import Fan, nothing_left, small, warm

AT_ONCE = 3
COUNTED = """
workload: {url: "", items: 10, one_worker: 1}
workflow:
  - step: start
    spec: {loop_mode: fanout, fanout: {engine: workers, max_groups: 2, max_concurrent: 1000}}
    loop: {in: "{{ range(items) | list }}", iterator: n}
    tool:
      kind: python
      input: {url: "{{ url }}", n: "{{ n }}", one_worker: "{{ one_worker }}"}
      code: |
        import psycopg2, time
        with psycopg2.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO at_once VALUES (%s)", [n])
            connection.commit()
            result = most = 0
            while most <= one_worker:  # nobody ends before both work
                cursor.execute("SELECT count(*), max(most) FROM at_once, most_at_once")
                now, most = cursor.fetchone()
                result = max(result, now)
                cursor.execute("UPDATE most_at_once SET most = %s WHERE most < %s", [now, now])
                connection.commit()
                time.sleep(0.01)
            cursor.execute("DELETE FROM at_once WHERE n = %s", [n])
        connection.close()
    next: [most]
  - step: most
    tool: {kind: python, input: {counts: "{{ start.results }}"}, code: "result = max(counts)"}
"""


@pytest.mark.parametrize("items", [60, pytest.param(3_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_limits_hold_at_every_moment(settings: Settings, items: int) -> None:
    """The queue has noops too, so that slots which the limit leaves free have work."""
    async with control_plane(settings, EventTransport.NATS) as own:
        engine = await Engine.open(own)
        pool = engine.runtime.pool
        await pool.execute("CREATE TABLE at_once (n integer)")
        await pool.execute("CREATE TABLE most_at_once AS SELECT 0 AS most")
        limits = {"worker_slots": 12, "worker_tool_pools": {"python": AT_ONCE}}
        async with working(own, "w1", **limits), working(own, "w2", **limits):
            await warm(engine)
            async with asyncio.timeout(20 * PATIENCE_SECONDS):
                counted, *others = await asyncio.gather(
                    engine.run(playbook(COUNTED), {"url": own.db_url, "items": items, "one_worker": AT_ONCE}),
                    *(engine.run(small()) for _ in range(3)),
                )
        assert {state.status for state in (counted, *others)} == {ExecutionStatus.COMPLETED}
        assert AT_ONCE < counted.latest["most"].envelope["data"] <= 2 * AT_ONCE, "both work, within their limits"
        await nothing_left(pool)
        await engine.close()


async def test_a_place_that_is_free_again_is_asked_for_at_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that had fewer places than there were commands is looked for when a place is free: nobody else wakes."""
    monkeypatch.setattr("noetl_dagster.engine.pool.connection.SWEEP_SECONDS", 1000.0)
    patient = settings.model_copy(update={"worker_heartbeat_seconds": 1000.0})
    engine = await Engine.open(patient)
    async with working(patient, "w", worker_slots=8, worker_tool_pools={"python": 1}):
        async with asyncio.timeout(PATIENCE_SECONDS):
            fan = await Fan.start(engine, tmp_path, 20)
            await fan.is_whole()
    await engine.close()


async def test_more_slots_than_a_claim_may_name(settings: Settings) -> None:
    async with control_plane(settings, EventTransport.HTTP) as own:
        engine = await Engine.open(own)
        async with working(own, "wide", worker_slots=1_200):
            await warm(engine)
        await engine.close()


async def test_a_worker_whose_claims_the_log_refuses_ends(settings: Settings) -> None:
    engine = await Engine.open(settings)
    worker = await PoolWorker.open(settings, "w")
    await engine.runtime.pool.execute("ALTER FUNCTION noetl.claim RENAME TO claim_of_another_version")
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(asyncpg.UndefinedFunctionError):
            await worker.run(asyncio.Event())
    await engine.runtime.pool.execute("ALTER FUNCTION noetl.claim_of_another_version RENAME TO claim")
    await worker.close()
    await engine.close()
