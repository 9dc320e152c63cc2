"""How long an execution will still take, and which loops wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from noetl_dagster.compiler.session import _describe_concurrent_loops
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.estimate import Estimate, Past, past_of
from noetl_dagster.engine.executions.overview import LoopView, Overview, StepView, overview
from noetl_dagster.engine.executions.progress import LoopProgress
from noetl_dagster.events.state import ExecutionStatus
from tests.engine.conftest import Run
from tests.playbooks import playbook
from tests.waiting import until

PAST = Past(
    began={"left": 0.0, "right": 0.0, "join": 20.0, "last": 35.0},
    ended={"left": 20.0, "right": 10.0, "join": 35.0, "last": 40.0},
)


def at(*steps: StepView) -> Overview:
    return Overview(execution_id="1", playbook="p", status="RUNNING", epoch=1, steps=steps)


def looping(step: str, done: int, total: int, status: str = "RUNNING") -> StepView:
    loop = LoopView(loop_id=step, total=total, done=done, failed=0, fanout=True)
    return StepView(step=step, status=status, visits=1, loop=loop)


def plainly(step: str, status: str = "RUNNING") -> StepView:
    return StepView(step=step, status=status, visits=1)


def test_loops_that_run_together_share_their_pace() -> None:
    estimate = Estimate(Past())
    assert estimate.remaining(at(looping("left", 0, 100), looping("right", 0, 100)), 0.0) is None
    assert estimate.remaining(at(looping("left", 10, 100), looping("right", 40, 100)), 10.0) == 30.0


def test_what_is_ahead_takes_as_long_as_it_did() -> None:
    estimate = Estimate(PAST)
    estimate.remaining(at(looping("left", 0, 100), looping("right", 0, 100)), 0.0)
    assert estimate.remaining(at(looping("left", 10, 100), looping("right", 40, 100)), 10.0) == 30.0 + 20.0
    ended = (looping("left", 100, 100, "COMPLETED"), looping("right", 100, 100, "COMPLETED"))
    assert estimate.remaining(at(*ended, plainly("join")), 40.0) == 15.0 + 5.0
    assert estimate.remaining(at(*ended, plainly("join")), 52.0) == 3.0 + 5.0
    assert estimate.remaining(at(*ended, plainly("join")), 70.0) == 5.0
    assert estimate.remaining(at(*ended, plainly("join", "COMPLETED"), plainly("last")), 71.0) == 5.0


def test_nobody_can_tell_without_loops_or_a_past() -> None:
    assert Estimate(Past()).remaining(at(plainly("join")), 0.0) is None


TWO = """
workload: {seconds: 0}
workflow:
  - {step: start, tool: {kind: python, input: {s: "{{ seconds }}"}, code: "import time; time.sleep(s)"}, next: [after]}
  - {step: after, tool: {kind: noop}}
"""


async def test_the_past_is_an_execution_of_the_same_playbook(run: Run, engine: Engine) -> None:
    first = await run(TWO, seconds=0.5)
    assert first.status is ExecutionStatus.COMPLETED
    assert await past_of(engine.runtime.pool, first.execution_id) == Past(), "it has none but itself"
    await run(TWO, seconds=0)
    again = await run(TWO, seconds=0.5)

    async def is_projected() -> bool:
        found = await past_of(engine.runtime.pool, again.execution_id)
        return (found.seconds("start") or 0) >= 0.5

    await until(is_projected, "the projection of the first one, which had the same workload")
    past = await past_of(engine.runtime.pool, again.execution_id)

    assert past.ended.keys() == {"start", "after"}
    assert past.end == past.ended["after"]


async def test_a_loop_that_nobody_runs_yet_waits(engine: Engine, tmp_path: Path) -> None:
    parsed = playbook(
        """
        workflow:
          - step: start
            loop: {in: "{{ range(4) }}", iterator: n}
            spec: {loop_mode: fanout}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
        """
    )
    execution = await engine.lifecycle.create(parsed)
    groups = (await engine.fanouts.expand(execution, "start")).groups

    async def loop() -> LoopView | None:
        steps = (await overview(engine.runtime, execution.id)).steps
        return steps[0].loop if steps else None

    async def is_seen() -> bool:
        found = await loop()
        return found is not None and found.waiting

    await until(is_seen, "a loop that waits")
    await asyncio.gather(*(engine.fanouts.run_group(execution, "start", group) for group in groups))
    found = await loop()
    assert found is not None
    assert (found.waiting, found.done) == (False, 4)


@pytest.mark.parametrize(
    ("loops", "said"),
    [
        ([("left", 10, 20)], ""),
        ([("left", 10, 20), ("right", 20, 20)], ""),
        ([("left", 10, 20), ("right", 0, 7), ("done", 3, 3)], "left 50 %, right 0 %"),
    ],
)
def test_branches_are_told_together(loops: list[tuple[str, int, int]], said: str) -> None:
    found = [LoopProgress(step, step, total, done, 0) for step, done, total in loops]
    assert _describe_concurrent_loops(found) == said
