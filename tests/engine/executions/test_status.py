"""Status reads one row, and is right while the projection is behind or does not run at all."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import (
    ChunksView,
    LoopView,
    WatermarkView,
    full_overview,
    overview,
)
from noetl_dagster.engine.steps.watermarks import watermarks
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events import projection
from noetl_dagster.events.projection import BackgroundProjection, Projection, read_execution
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS, until

TEXT = """
workload: {factor: 3}
workflow:
  - step: start
    loop: {in: "{{ range(30) | list }}", iterator: n, spec: {mode: parallel}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / (n - 7)"}
    next:
      arcs: [{step: fan, when: "{{ loop.failed == 1 }}"}]
  - step: fan
    loop: {in: "{{ range(12) | list }}", iterator: n}
    spec: {loop_mode: fanout}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 'x' * 3000"}
    next: [bad]
  - step: bad
    tool: {kind: python, code: "raise ValueError('spilled')"}
"""


async def run(engine: Engine) -> int:
    execution = await engine.lifecycle.create(playbook(TEXT))
    await engine.walker.run(execution)  # not driven by Engine.run: no projection beside it
    return execution.id


async def settle(engine: Engine) -> None:
    taken = Projection(engine.runtime.pool)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await taken.catch_up()
        while await taken.lag_seconds() > 0:
            await asyncio.sleep(0.02)
            await taken.catch_up()


async def test_the_row_its_tail_and_the_log_say_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    execution_id = await run(engine)
    from_tail: Any = await read_execution(engine.runtime.pool, execution_id)
    monkeypatch.setattr(projection, "TAIL_LIMIT", 10)
    from_log: Any = await read_execution(engine.runtime.pool, execution_id)
    monkeypatch.undo()
    await settle(engine)
    from_row: Any = await read_execution(engine.runtime.pool, execution_id)
    assert asdict(from_tail) == asdict(from_log) == asdict(from_row)
    assert await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.execution") == 1


async def test_the_overview_has_the_counts_of_every_step(engine: Engine) -> None:
    execution_id = await run(engine)
    found = await overview(engine.runtime, execution_id)
    assert (found.status, found.playbook, found.workload) == ("FAILED", "sample", {"factor": 3})
    assert [(step.step, step.status) for step in found.steps] == [
        ("start", "FAILED"),
        ("fan", "COMPLETED"),
        ("bad", "FAILED"),
    ]
    loop, fanout, _ = (step.loop for step in found.steps)
    assert isinstance(loop, LoopView)
    assert isinstance(fanout, LoopView)
    assert (loop.total, loop.done, loop.failed, loop.fanout) == (30, 29, 1, False)
    assert (fanout.total, fanout.done, fanout.failed, fanout.fanout) == (12, 12, 0, True)
    assert found.steps[1].result is not None
    assert "spilled" in str(found.steps[2].error)


async def test_driving_keeps_the_projection_up_to_date(engine: Engine) -> None:
    state = await engine.run(playbook(TEXT))
    await until(lambda: projected(engine, state.execution_id, "FAILED"))


@pytest.mark.long
async def test_driving_waits_for_what_has_not_settled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older transaction, of whatever database, holds the projection back for longer than it lingers."""
    monkeypatch.setattr(projection, "INTERVAL", 0.1)
    engine.projecting = BackgroundProjection(Projection(engine.runtime.pool), linger=0.1)
    async with engine.runtime.pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_current_xact_id()")
        state = await engine.run(playbook(TEXT))
        await asyncio.sleep(4 * projection.INTERVAL)
        assert not await projected(engine, state.execution_id, "FAILED")
    await until(lambda: projected(engine, state.execution_id, "FAILED"))


async def projected(engine: Engine, execution_id: int, status: str) -> bool:
    query = "SELECT status FROM noetl.execution WHERE execution_id = $1"
    return bool(await engine.runtime.pool.fetchval(query, execution_id) == status)


async def test_an_unknown_execution_is_said_to_be_unknown(engine: Engine) -> None:
    with pytest.raises(ExecutionNotFoundError, match="42"):
        await overview(engine.runtime, 42)


STREAM = """
workload: {flag: "", fails: false}
workflow:
  - step: read
    state: {key: n, initial: 0}
    tool:
      kind: python
      input: {flag: "{{ flag }}", fails: "{{ fails }}"}
      code: |
        import os, time
        for n in range(1, 5):
            while n == 4 and flag and not os.path.exists(flag):
                time.sleep(0.01)
            if n == 4 and fails:
                raise ValueError('planned')
            yield [{'n': n}, {'n': n}]
    next: {arcs: [{step: take, on: call.partial}, {step: end}]}
  - step: take
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = len(rows)"}
  - step: end
    tool: {kind: python, input: {fails: "{{ fails }}"}, code: "result = 1"}
"""


async def test_the_overview_counts_chunks_while_they_are_made(engine: Engine, tmp_path: Path) -> None:
    flag = tmp_path / "on"
    execution = await engine.lifecycle.create(playbook(STREAM), {"flag": str(flag)})
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))

    async def two() -> bool:
        found = {step.step: step for step in (await overview(engine.runtime, execution.id)).steps}
        return "take" in found and found["take"].loop is not None and found["take"].loop.done >= 2

    await until(two, "two chunks to be taken: the third waits to know whether it is the last")
    found = await overview(engine.runtime, execution.id)
    read, take, *_ = found.steps
    assert (read.chunks, take.chunks) == (ChunksView(made=2, rows=4), None)
    assert take.loop is not None
    assert (take.loop.total, take.loop.so_far, take.loop.done) == (0, 2, 2)
    assert take.loop.remaining_seconds is None
    flag.touch()
    await work
    read, take, *_ = (await overview(engine.runtime, execution.id)).steps
    assert take.loop is not None
    assert (read.chunks, take.loop.total, take.loop.so_far) == (ChunksView(made=4, rows=8), 4, None)


async def test_who_took_the_chunks_of_a_failed_step_is_open(engine: Engine) -> None:
    state = await engine.run(playbook(STREAM), {"fails": True})
    found = await overview(engine.runtime, state.execution_id)
    assert found.status == "FAILED"
    assert [(step.step, step.status) for step in found.steps] == [("read", "FAILED"), ("take", "OPEN")]


async def test_a_watermark_is_told_when_it_counts(engine: Engine) -> None:
    text = playbook(STREAM.replace("result = len(rows)", "1 / (rows[0]['n'] - 2)"))
    state = await engine.run(text)
    found = await full_overview(engine.runtime, state.execution_id)
    assert (found.status, found.steps[0].status) == ("FAILED", "COMPLETED")
    assert [step.watermark for step in found.steps] == [None] * len(found.steps)
    assert await watermarks(engine.runtime.pool, text.metadata.path) == []
    state = await engine.run(playbook(STREAM))
    found = await full_overview(engine.runtime, state.execution_id)
    assert found.steps[0].watermark == WatermarkView(value=4, previous=0)
