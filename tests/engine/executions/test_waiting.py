"""Which loops wait, and loops that run side by side."""

from __future__ import annotations

import asyncio

import pytest

from noetl_dagster.compiler.session import _describe_concurrent_loops
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import LoopView, StepView, overview
from tests.playbooks import playbook
from tests.waiting import until


async def test_a_loop_that_nobody_runs_yet_waits(engine: Engine) -> None:
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
    steps = [
        StepView(
            step=step,
            status="RUNNING",
            visits=1,
            loop=LoopView(loop_id=step, total=total, done=done, failed=0, fanout=False),
        )
        for step, done, total in loops
    ]
    assert _describe_concurrent_loops(steps) == said
