"""Steps whose commands run in the pool mean the same as steps that run in the op."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool import connection
from noetl_dagster.engine.steps.watermarks import watermarks
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook, text_of
from tests.pool import working
from tests.pool_worker.conftest import control_plane
from tests.waiting import PATIENCE_SECONDS, until

SQUARES = """
workload: {count: 40, base: 1}
workflow:
  - step: start
    tool: {kind: python, input: {n: "{{ count }}"}, code: "result = list(range(n))"}
    next: [squares]
  - step: squares
    spec: {dispatch: workers}
    loop: {in: "{{ start.data }}", iterator: n, mode: parallel, max_in_flight: 20}
    tool:
      kind: python
      input: {n: "{{ n }}", base: "{{ base }}"}
      code: |
        import os
        result = {"square": n * n + base, "pid": os.getpid()}
    next: [end]
  - step: end
    tool: {kind: python, input: {found: "{{ squares.results }}"}, code: "result = sum(x['square'] for x in found)"}
"""


async def test_a_loop_runs_in_the_pool(engine: Engine, settings: Settings) -> None:
    async with working(settings, "w1", worker_slots=8):
        state = await engine.run(playbook(SQUARES))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == sum(n * n + 1 for n in range(40))
    events = [event async for event in engine.runtime.log.events(state.execution_id)]
    claims = [event for event in events if event.event_type == "command.claimed" and event.worker_id == "w1"]
    assert len(claims) == 40
    assert await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.queue") == 0


async def test_chunks_are_taken_by_workers_in_order_and_with_what_was_set(engine: Engine, settings: Settings) -> None:
    text = """
    workload: {pages: 12}
    workflow:
      - step: start
        loop: {in: "{{ range(pages) | list }}", iterator: page, spec: {mode: sequential}}
        tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page * 1000 + n for n in range(3000)]"}
        next: [{step: take, on: call.partial}]
      - step: take
        spec: {dispatch: workers}
        tool:
          kind: python
          input: {rows: "{{ chunk.rows }}", before: "{{ ctx.seen | default([]) }}"}
          code: "result = before + [[rows[0], len(rows)]]"
          set: {ctx.seen: "{{ output.data }}"}
        next: [end]
      - step: end
        tool: {kind: python, input: {seen: "{{ ctx.seen }}"}, code: "result = seen"}
    """
    async with working(settings, "w1", worker_slots=8):
        state = await engine.run(playbook(text))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == [[page * 1000, 3000] for page in range(12)]
    events = [event async for event in engine.runtime.log.events(state.execution_id)]
    taken = [event for event in events if event.event_type == "command.completed" and event.node_name == "take"]
    assert [(event.worker_id, event.current_index) for event in taken] == [("w1", page) for page in range(12)]


async def test_ends_and_commands_wake_who_waits(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking around at intervals is for what got lost: nobody waits for it in ordinary work."""
    monkeypatch.setattr(connection, "SWEEP_SECONDS", 1000.0)
    changes = {"worker_heartbeat_seconds": 1000.0, "worker_tool_pools": {"python": 1}}
    patient = settings.model_copy(update=changes)
    text = """
    workflow:
      - step: start
        tool: {kind: noop}
        next: [loop]
      - step: loop
        spec: {dispatch: workers}
        loop: {in: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], iterator: n, mode: sequential}
        tool: {kind: noop}
        next: [shards]
      - step: shards
        spec: {dispatch: workers, loop_mode: fanout}
        loop: {in: "{{ range(60) }}", iterator: n}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    """
    engine = await Engine.open(patient)
    async with working(patient, "w1", worker_slots=4), asyncio.timeout(PATIENCE_SECONDS):
        state = await engine.run(playbook(text))
    await engine.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["loop"].envelope["done"] == 10
    assert state.latest["shards"].envelope["done"] == 60, "a kind with a limit goes on by itself"


async def test_sequential_iterations_see_what_the_earlier_ones_set(engine: Engine, settings: Settings) -> None:
    text = """
    workflow:
      - step: start
        tool: {kind: noop}
        set: {ctx.total: 0}
        next: [add]
      - step: add
        spec: {dispatch: workers}
        loop: {in: [5, 6, 7], iterator: n, mode: sequential}
        tool:
          kind: python
          input: {n: "{{ n }}", total: "{{ ctx.total }}"}
          code: "result = total + n"
          set: {ctx.total: "{{ output.data }}"}
        next: [end]
      - step: end
        tool: {kind: python, input: {total: "{{ ctx.total }}"}, code: "result = total"}
    """
    async with working(settings, "w1"), working(settings, "w2"):
        state = await engine.run(playbook(text))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == 18


async def test_an_op_that_stops_waiting_takes_its_commands_back(engine: Engine) -> None:
    text = """
    workflow:
      - step: start
        spec: {dispatch: workers}
        tool: {kind: noop}
    """
    running = asyncio.create_task(engine.run(playbook(text)))
    pool = engine.runtime.pool
    await until(lambda: pool.fetchval("SELECT count(*) FROM noetl.queue"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await pool.fetchval("SELECT count(*) FROM noetl.queue") == 0


async def test_watermarks_of_workers(settings: Settings, pool: asyncpg.Pool[Any]) -> None:
    """They see where the step goes on from, and what they load counts with their ends."""
    text = """
    workload: {new: [1, 2]}
    workflow:
      - step: load
        spec: {dispatch: workers}
        state: {key: n, initial: 0}
        tool:
          kind: python
          input: {new: "{{ new }}", since: "{{ state.value }}"}
          code: "result = [{'n': n} for n in new if n > since]"
        sink: {tool: postgres, auth: pg, table: numbers}
        next: [each]
      - step: each
        spec: {dispatch: workers}
        state: {key: n, initial: 0}
        loop: {in: "{{ new }}", iterator: one, mode: parallel}
        tool: {kind: python, input: {one: "{{ one }}"}, code: "result = [{'n': one}]"}
    """
    await pool.execute("CREATE TABLE numbers (n int)")
    own = settings.model_copy(update={"default_postgres_credential": "embedded"})
    async with control_plane(own, EventTransport.HTTP) as plane, working(plane, "w1"):
        engine = await Engine.open(plane)
        for new in ([1, 2], [2, 3]):
            state = await engine.run(playbook(text), {"new": new})
            assert state.status is ExecutionStatus.COMPLETED, state.error
        await engine.close()
    assert await pool.fetchval("SELECT array_agg(n ORDER BY n) FROM numbers") == [1, 2, 3]
    found = {one.name: one.value for one in await watermarks(pool, "tests/sample")}
    assert found == {"load": 3, "each": 3}
    said = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed' AND meta ? 'watermark'"
    assert await pool.fetchval(said) == 2


async def test_workers_read_a_lenient_playbook_leniently(settings: Settings, pool: asyncpg.Pool[Any]) -> None:
    text = """
    workload: {most: 2}
    workflow:
      - step: start
        colour: red
        spec: {dispatch: workers}
        loop: {in: [1, 2, 3], iterator: one, mode: parallel, max_in_flight: "{{ most }}"}
        tool: {kind: python, cods: b, input: {one: "{{ one }}"}, code: "result = one"}
    """
    async with control_plane(settings, EventTransport.HTTP) as plane, working(plane, "w1"):
        engine = await Engine.open(plane)
        execution = await engine.lifecycle.create(parse_playbook(text_of("sample", text), lenient=True))
        await pool.execute("UPDATE noetl.catalog SET model = NULL")  # as of another version of this package
        await engine.walker.run(execution)
        await engine.close()
    assert execution.state.status is ExecutionStatus.COMPLETED, execution.state.error
    done = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed' AND worker_id = 'w1'"
    assert await pool.fetchval(done) == 3
