"""Large fan-outs: the log grows with the number of items and memory does not. Minutes: ``-m slow``.

How long they take is measured by ``benchmarks/fanout.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from tests.engine.conftest import Run

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
    small, small_growth = await _measured(run, 10_000)
    large, large_growth = await _measured(run, 100_000)

    assert large.latest["fan"].envelope["done"] == 100_000
    assert small.latest["fan"].envelope["done"] == 10_000
    assert large_growth < small_growth + 100 * 1024**2, "memory does not grow with the items"
    more = await _events(engine, large) - await _events(engine, small)
    assert more == 4 * 90_000, "nor do the events an item: enqueued, issued, claimed, done"
    result = large.latest["fan"].envelope["ref"]
    total = 0
    async for item in engine.runtime.results.items(result):
        total += item
    assert total == sum(range(100_000))


async def _events(engine: Engine, state: ExecutionState) -> int:
    """How many there are, without the heartbeats of a machine on which commands take long."""
    query = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type <> 'command.heartbeat'"
    return int(await engine.runtime.pool.fetchval(query, state.execution_id))


async def _measured(run: Run, items: int) -> tuple[ExecutionState, int]:
    with _peak() as peak:
        state = await run(PLAYBOOK, items=items)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return state, max(peak)


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
