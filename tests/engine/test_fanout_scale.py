"""Large fan-outs: time grows with the number of items and memory does not. Minutes: ``-m slow``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus

from .conftest import Run

pytestmark = pytest.mark.slow

PLAYBOOK = """
workload: {items: 1}
workflow:
  - step: fan
    loop: {in: "{{ range(items) }}", iterator: n}
    spec: {loop_mode: fanout}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
"""


async def test_a_hundred_thousand_items(run: Run, engine: Engine) -> None:
    small, small_growth, small_seconds = await _measured(run, 10_000)
    large, large_growth, large_seconds = await _measured(run, 100_000)

    assert large.latest["fan"].envelope["done"] == 100_000
    assert small.latest["fan"].envelope["done"] == 10_000
    assert large_growth < small_growth + 100 * 1024**2, "memory does not grow with the items"
    assert large_seconds / small_seconds < 20, "nor the time an item"
    result = large.latest["fan"].envelope["ref"]
    total = 0
    async for item in engine.runtime.results.items(result):
        total += item
    assert total == sum(range(100_000))


async def _measured(run: Run, items: int) -> tuple[ExecutionState, int, float]:
    started = time.monotonic()
    with _peak() as peak:
        state = await run(PLAYBOOK, items=items)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return state, max(peak), time.monotonic() - started


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Resident bytes above those at the start, seen while the block runs."""
    process, over = psutil.Process(), threading.Event()
    before, seen = process.memory_info().rss, [0]

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
