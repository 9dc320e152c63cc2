"""Loops and fan-outs on several processes: the same log as on one, and nothing lost when a helper is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine import helpers
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import Settings
from tests.forked import fork_helpers
from tests.ledger import assert_only_unfinished_ran_again, lines, written_by
from tests.playbooks import playbook
from tests.waiting import ended, until

pytestmark = pytest.mark.long

Open = Callable[..., Any]

FANOUT = "loop_mode: fanout, fanout: {max_groups: 3, max_concurrent: 6}"
PARALLEL = "{in: '{{ range(ITEMS) | list }}', iterator: n, spec: {mode: parallel, max_in_flight: 6}}"
SHARDS = "{in: '{{ range(ITEMS) | list }}', iterator: n}"
EVENTS = """
SELECT event_type, node_name, current_index, meta ->> 'attempt' AS attempt, result ->> 'status' AS status
FROM noetl.event WHERE execution_id = $1
"""
ENDS = """
SELECT current_index, worker_id FROM noetl.event
WHERE execution_id = $1 AND node_name = 'fan'
  AND event_type IN ('loop.shard.done', 'loop.shard.failed', 'command.completed', 'command.failed')
"""
NEWEST = "SELECT max(execution_id) FROM noetl.event WHERE event_type = 'step.enter'"
ITEMS = 60
ASLEEP = '{kind: python, input: {n: "{{ n }}"}, code: "import time; time.sleep(0.05); result = n"}'


@pytest.fixture
async def open_engine(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Opens engines with so many processes, which have begun already unless told otherwise."""
    async with AsyncExitStack() as stack:

        async def opened(processes: int, *, helped: bool = True, forked: bool = True) -> Engine:
            if forked:
                fork_helpers(monkeypatch.setattr)
            engine = await Engine.open(settings.model_copy(update={"run_processes": processes}))
            stack.push_async_callback(engine.close)
            while helped and len(engine.helpers.pids) < processes - 1:
                await engine.run(playbook(text(ASLEEP, fanout=True, items=30)))
            return engine

        yield opened


def text(tool: str, *, fanout: bool, items: int = ITEMS, spec: str = FANOUT, loop: str = "") -> str:
    loop = loop or (SHARDS if fanout else PARALLEL)
    return f"""
workload: {{ledger: ""}}
workflow:
  - step: fan
    loop: {loop.replace("ITEMS", str(items))}
    {f"spec: {{{spec}}}" if fanout else ""}
    tool: {tool}
    next: [after]
  - {{step: after, tool: {{kind: python, input: {{found: "{{{{ fan.results }}}}"}}, code: "result = found"}}}}
"""


async def once_helped(engine: Engine, ledger: Path, work: asyncio.Task[Any]) -> int:
    """Waits until a helper has begun an item; its process id."""

    def helper_pids() -> set[int]:
        assert not work.done(), work.result()
        return {pid for _, pid in lines(ledger)} - {os.getpid()} if ledger.exists() else set()

    [pid, *_] = await until(helper_pids, "a helper's first item")
    assert pid in engine.helpers.pids
    return pid


def go(ledger: Path) -> None:
    ledger.with_name("go").touch()


@pytest.mark.parametrize("fanout", [True, False], ids=["fanout", "parallel"])
async def test_the_log_is_that_of_one_process(open_engine: Open, tmp_path: Path, fanout: bool) -> None:
    logs, results = [], []
    for processes in (1, 3):
        ledger = tmp_path / str(processes) / "ledger"
        ledger.parent.mkdir()
        engine = await open_engine(processes)
        tool = written_by("n % 7 == 0", "n * 2")  # some wait for "go", so that nobody does all alone
        parsed = playbook(text(tool, fanout=fanout))
        running = asyncio.create_task(engine.run(parsed, {"ledger": str(ledger)}))
        if processes > 1:
            await once_helped(engine, ledger, running)
        go(ledger)
        state = await running

        assert state.status is ExecutionStatus.COMPLETED, state.error
        results.append(state.latest["after"].envelope["data"])
        logs.append(Counter(map(tuple, await engine.runtime.pool.fetch(EVENTS, state.execution_id))))
        pids = {pid for _, pid in lines(ledger)}
        assert (len(pids) > 1) == (processes > 1)

    assert results[0] == results[1]
    assert logs[0] == logs[1]


RETRY = [{"when": "{{ error is defined }}", "then": {"max_attempts": 3}}]


@pytest.mark.parametrize(("fanout", "more"), [(True, {}), (False, {"retry": RETRY})], ids=["fanout", "retried"])
async def test_what_a_killed_helper_had_is_done_by_others(
    open_engine: Open, tmp_path: Path, fanout: bool, more: dict[str, Any]
) -> None:
    engine, ledger = await open_engine(3), tmp_path / "ledger"
    tool = written_by("begun > 20", **more)
    running = asyncio.create_task(engine.run(playbook(text(tool, fanout=fanout)), {"ledger": str(ledger)}))
    pid = await once_helped(engine, ledger, running)
    execution_id = await engine.runtime.pool.fetchval(NEWEST)
    await until(lambda: len(lines(ledger)) > 24, "items that wait")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in engine.helpers.pids, "that the helper is missed")
    finished = [row["current_index"] for row in await engine.runtime.pool.fetch(ENDS, execution_id)]
    go(ledger)
    state = await running

    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["after"].envelope["data"] == list(range(ITEMS))
    assert_only_unfinished_ran_again(ledger, ITEMS, finished)
    ends = Counter(row["current_index"] for row in await engine.runtime.pool.fetch(ENDS, execution_id))
    assert ends == Counter(range(ITEMS))


async def test_no_more_items_at_once_than_the_playbook_allows(open_engine: Open, tmp_path: Path) -> None:
    engine, ledger = await open_engine(3), tmp_path / "ledger"
    tool = """
      kind: python
      input: {n: "{{ n }}", ledger: "{{ ledger }}"}
      code: |
        import os, time, pathlib
        path = pathlib.Path(ledger)
        mine = path.with_name(f"running-{n}")
        with path.open("a") as file:
            file.write(f"{n} {os.getpid()}\\n")
        mine.touch()
        time.sleep(0.02)
        result = len(list(path.parent.glob("running-*")))
        mine.unlink()
"""
    spec = "loop_mode: fanout, fanout: {max_groups: 1, max_concurrent: 6}"
    state = await engine.run(playbook(text(tool, fanout=True, spec=spec)), {"ledger": str(ledger)})

    assert max(state.latest["after"].envelope["data"]) <= 6
    assert len({pid for _, pid in lines(ledger)}) == 3


@pytest.mark.parametrize("fanout", [True, False], ids=["fanout", "parallel"])
async def test_the_first_failure_stops_all_processes(open_engine: Open, tmp_path: Path, fanout: bool) -> None:
    engine, ledger = await open_engine(2), tmp_path / "ledger"
    spec = "loop_mode: fanout, fanout: {max_groups: 1, max_concurrent: 4, fail_fast: true, max_shard_retries: 0}"
    loop = SHARDS if fanout else PARALLEL.replace("max_in_flight: 6", "max_in_flight: 4, fail_fast: true")
    tool = written_by("begun > 10", f"n if os.getpid() == {os.getpid()} else 1 // 0")
    parsed = playbook(text(tool, fanout=fanout, items=300, spec=spec, loop=loop))
    running = asyncio.create_task(engine.run(parsed, {"ledger": str(ledger)}))
    await once_helped(engine, ledger, running)
    go(ledger)
    state = await running

    assert state.status is ExecutionStatus.FAILED
    assert len(lines(ledger)) < 300


async def test_a_cancellation_reaches_helpers(open_engine: Open, tmp_path: Path) -> None:
    engine, ledger = await open_engine(2), tmp_path / "ledger"
    tool = written_by("begun > 3")
    running = asyncio.create_task(engine.run(playbook(text(tool, fanout=True)), {"ledger": str(ledger)}))
    await once_helped(engine, ledger, running)
    execution_id = await engine.runtime.pool.fetchval(NEWEST)
    await engine.lifecycle.cancel(execution_id, "as asked")
    state = await running
    begun = len(lines(ledger))

    assert state.status is ExecutionStatus.CANCELLED
    go(ledger)
    await asyncio.sleep(0.3)
    assert len(lines(ledger)) == begun < ITEMS


async def test_helpers_come_when_one_core_is_not_enough(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(helpers, "LOOK_SECONDS", 0.05)
    engine = await open_engine(0)
    few = text('{kind: python, input: {n: "{{ n }}"}, code: "result = n"}', fanout=True, items=20)
    small = await engine.run(playbook(few))
    assert small.status is ExecutionStatus.COMPLETED
    assert not engine.helpers.pids

    burn = """
      kind: python
      input: {ledger: "{{ ledger }}"}
      code: |
        import os, pathlib, time
        path = pathlib.Path(ledger)
        with path.open("a") as file:
            file.write(f"{os.getpid()} ")
        end = time.process_time() + (0.05 if len(set(path.read_text().split())) < 2 else 0)
        while time.process_time() < end: pass
        result = os.getpid()
"""
    ledger = str(tmp_path / "ledger")
    state = await engine.run(playbook(text(burn, fanout=True, items=400, spec=FANOUT)), {"ledger": ledger})

    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert len(set(state.latest["after"].envelope["data"])) == 2


async def test_what_waits_needs_no_helpers(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(helpers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(helpers, "_wanted_cpu", time.process_time)  # other tests may keep this one waiting for a core
    engine = await open_engine(0)

    state = await engine.run(playbook(text(ASLEEP, fanout=True, items=60)))

    assert state.status is ExecutionStatus.COMPLETED
    assert not engine.helpers.pids


@pytest.mark.parametrize("tool", ["kind: playbook, path: a/b", 'kind: duckdb, command: "SELECT 1"'])
async def test_some_tools_stay_with_the_driver(open_engine: Open, tool: str) -> None:
    engine = await open_engine(2, helped=False)
    parsed = playbook(text(f"{{{tool}}}", fanout=False))

    assert (await engine.lifecycle.create(parsed)).program.step("fan").keeps_to_driver


async def test_a_run_goes_on_alone_where_no_helper_can_start(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helpers, "PRELOADED_MODULE", "noetl_dagster.no_such_module")
    engine = await open_engine(2, helped=False)

    state: ExecutionState = await engine.run(playbook(text(ASLEEP, fanout=True, items=150)))

    assert state.status is ExecutionStatus.COMPLETED
    assert "works in one process" in caplog.text


async def test_helpers_end_with_their_engine(open_engine: Open) -> None:
    engine = await open_engine(3, forked=False)
    pids = engine.helpers.pids
    await engine.close()

    assert pids
    await until(lambda: all(map(ended, pids)), "the end of the helpers")
