"""Several drivers of one execution: each step, iteration and arc still happens once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.steps.regions import TokenQueue
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.settings import Settings
from tests.playbooks import playbook

DRIVERS = 4

LOOP = """
workflow:
  - step: start
    loop: {in: "{{ range(20) | list }}", iterator: n, spec: {mode: MODE, max_in_flight: 20}}
    tool: {kind: postgres, auth: pg, command: "INSERT INTO ran VALUES ({{ n }})"}
    next: [after]
  - step: after
    tool: {kind: postgres, auth: pg, command: "INSERT INTO ran VALUES (100)"}
"""
FANOUT = LOOP.replace(
    "spec: {mode: MODE, max_in_flight: 20}}", "spec: {mode: parallel}}\n    spec: {loop_mode: fanout}"
)


@pytest.fixture
async def drivers(settings: Settings) -> AsyncIterator[list[Engine]]:
    """Engines with connections of their own, as processes would have."""
    engines = [await Engine.open(settings) for _ in range(DRIVERS)]
    yield engines
    await asyncio.gather(*(engine.close() for engine in engines))


@pytest.mark.parametrize(
    "text",
    [LOOP.replace("MODE", "parallel"), LOOP.replace("MODE", "sequential"), FANOUT],
    ids=["parallel", "sequential", "fanout"],
)
async def test_drivers_at_a_barrier_do_everything_once(drivers: list[Engine], text: str) -> None:
    pool = drivers[0].runtime.pool
    await pool.execute("CREATE TABLE ran (n int)")
    loaded = playbook(text)
    for _ in range(3):
        created = await drivers[0].lifecycle.create(loaded)
        barrier = asyncio.Barrier(DRIVERS)

        async def drive(engine: Engine, execution_id=created.id, barrier=barrier) -> ExecutionStatus:
            execution = await engine.runtime.load(execution_id)
            await engine.liveness.hold(execution_id)
            await barrier.wait()
            return await engine.walker.run(execution)

        ended = await asyncio.gather(*map(drive, drivers))
        state = (await drivers[0].runtime.load(created.id)).state
        assert set(ended) == {ExecutionStatus.COMPLETED}, state.error
        ran = Counter(row["n"] for row in await pool.fetch("DELETE FROM ran RETURNING n"))
        assert ran == Counter([*range(20), 100])
        counts = dict(
            await pool.fetch(
                "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1", created.id
            )
        )
        assert counts["command.issued"] == counts["command.claimed"] == 21
        assert counts.get("loop.done", 0) + counts.get("loop.fanin.completed", 0) == 1
        assert counts["step.exit"] == counts["step.enter"] == 2
        assert counts["playbook.completed"] == counts["workflow.completed"] == 1


CYCLE = """
workflow:
  - {step: start, tool: {kind: noop}, next: {spec: {mode: inclusive}, arcs: [{step: left}, {step: right}]}}
  - {step: left, tool: {kind: noop}, next: [join]}
  - {step: right, tool: {kind: noop}, next: [join]}
  - {step: join, tool: {kind: noop}, next: [start]}
"""


def test_arcs_that_meet_in_a_round_of_a_cycle_make_one_visit() -> None:
    [region] = StepGraph(playbook(CYCLE)).regions
    queue = TokenQueue(region, {step: place for place, step in enumerate(region.order)})
    targets = {"start": ["left", "right"], "left": ["join"], "right": ["join"], "join": ["start"]}
    queue.add(["start"])
    visits = []
    for _ in range(8):
        visits.append(queue.take())
        queue.add(targets[visits[-1][0]])
    assert visits[:4] in (
        [("start", 1), (a, 1), (b, 1), ("join", 1)] for a, b in [("left", "right"), ("right", "left")]
    )
    assert [(step, visit - 1) for step, visit in visits[4:]] == visits[:4]
