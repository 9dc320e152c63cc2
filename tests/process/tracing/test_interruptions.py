"""Killed, failed, resumed, cancelled: still one tree, in which nothing is told twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.playbooks import playbook, text_of
from tests.process.tracing.collector import Collector
from tests.processes import killed_in_the_end
from tests.waiting import until

WAITING = """
workload: {file: ""}
workflow:
  - step: start
    tool: {kind: python, code: "result = 1"}
    next: [each]
  - step: each
    loop: {in: "{{ range(6) }}", iterator: n, spec: {mode: parallel, max_in_flight: 6}}
    tool:
      kind: python
      input: {n: "{{ n }}", file: "{{ file }}"}
      code: |
        import os, time
        while n >= 3 and not os.path.exists(file):
            time.sleep(0.02)
        result = n
"""


async def test_a_driver_that_is_killed_and_another_that_goes_on(
    settings: Settings, engine: Engine, collector: Collector, tmp_path: Path
) -> None:
    file, go = tmp_path / "waiting.yaml", tmp_path / "go"
    file.write_text(text_of("waiting", WAITING))
    with killed_in_the_end() as start:
        driver = start(
            [sys.executable, "-m", "noetl_dagster", "run", str(file), "--set", f"file={go}", "--json"],
            env={**os.environ, **embedded.environment(settings)},
            stdout=subprocess.PIPE,
            cwd=tmp_path,
        )
        await until(lambda: len(collector.named("each command")) == 3, "the first items' spans")
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    [span] = collector.named("start")
    go.touch()
    state = await engine.resume(int(span.attributes["noetl.execution_id"]))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    await collector.whole("waiting")
    items = collector.named("each command")
    assert sorted(span.attributes["noetl.index"] for span in items) == list(range(6))
    assert {one.resource["process.pid"] for one in items} == {driver.pid, os.getpid()}
    assert {one.parent for one in items} == {collector.one("each").span_id}


async def test_what_failed_is_resumed_in_the_same_trace(engine: Engine, collector: Collector, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    body = """
    workload: {file: ""}
    workflow:
      - step: start
        tool: {kind: python, code: "result = 1"}
        next: [fragile]
      - step: fragile
        tool: {kind: python, input: {file: "{{ file }}"}, code: "result = open(file).read()"}
    """
    state = await engine.run(playbook(body), {"file": str(flag)})
    assert state.status is ExecutionStatus.FAILED
    flag.write_text("there")
    state = await engine.resume(state.execution_id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    await until(lambda: collector.named("sample resumed"))
    await collector.whole("sample")
    root, resumed = collector.one("sample"), collector.one("sample resumed")
    assert (root.error is None, resumed.error) == (False, None)
    assert resumed.parent == root.span_id
    assert resumed.start >= root.end - 1_000_000, "times of events are milliseconds"
    first, second = collector.named("fragile")
    assert [first.parent, second.parent] == [root.span_id, resumed.span_id]


async def test_what_is_cancelled_ends_with_all_that_was_under_way(
    engine: Engine, settings: Settings, collector: Collector, tmp_path: Path
) -> None:
    execution = await engine.lifecycle.create(playbook(WAITING), {"file": str(tmp_path / "go")})
    running = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    under_way = """
        SELECT array_agg(event_type ORDER BY event_type) = array_fill('command.claimed'::text, '{6}')
            || array_fill('command.completed'::text, '{3}')
        FROM noetl.event WHERE event_type IN ('command.claimed', 'command.completed') AND node_name = 'each'
    """
    await until(lambda: engine.runtime.pool.fetchval(under_way), "six claims, of which three have ended")
    other = await Engine.open(settings)
    assert await other.lifecycle.cancel(execution.id, "enough")
    await asyncio.wait({running})
    (tmp_path / "go").touch()
    assert running.exception() is not None
    await other.close()
    await until(lambda: len(collector.named("each command")) == 6)
    await collector.whole("sample")
    assert collector.one("sample").error == "enough"
    assert collector.one("each").error is not None
    errors = [span.error for span in collector.named("each command")]
    assert sorted(error or "" for error in errors) == ["", "", "", "enough", "enough", "enough"]
