"""The spark engine: the same commands, events and results, run by Spark's Python workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from tests.ledger import assert_only_unfinished_ran_again, lines, written_by
from tests.playbooks import playbook
from tests.waiting import ended, until

pytestmark = pytest.mark.spark

EVENTS = "SELECT * FROM noetl.event WHERE execution_id = $1 AND event_type = $2 AND node_name = 'fan'"


@pytest.fixture
async def engine(settings: Settings, sessions: SparkSessions) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings, spark=sessions.get)
    yield engine
    await engine.close()


async def events(engine: Engine, state: ExecutionState, kind: str) -> list[Any]:
    return list(await engine.runtime.pool.fetch(EVENTS, state.execution_id, kind))


PARTITIONED = """
workload: {bad: -1}
workflow:
  - step: start
    tool: {kind: python, code: "result = list(range(200))"}
    next: [fan]
  - step: fan
    loop: {in: "{{ start.data }}", iterator: n}
    spec:
      loop_mode: fanout
      fanout: {engine: ENGINE, granularity: partition, max_groups: 8, max_shard_retries: 0}
    tool:
      kind: python
      input: {n: "{{ n }}", bad: "{{ bad }}"}
      code: |
        if n == bad:
            raise ValueError("spoilt")
        result = n * 2
    next:
      arcs:
        - {step: total, when: "{{ fanin.status == 'complete' }}"}
        - {step: partial, when: "{{ fanin.status == 'partial' }}"}
  - {step: total, tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = items"}}
  - {step: partial, tool: {kind: noop}}
"""


@pytest.mark.parametrize("name", ["spark", "dagster"])
async def test_a_partition_is_one_shard_of_many_items(engine: Engine, name: str) -> None:
    state = await engine.run(playbook(PARTITIONED.replace("ENGINE", name)))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    result = state.latest["total"].envelope
    data = result["data"] if "data" in result else await engine.runtime.results.get(result["ref"])
    assert data == [n * 2 for n in range(200)]
    for kind in ("loop.shard.enqueued", "command.issued", "command.claimed", "loop.shard.done"):
        assert len(await events(engine, state, kind)) == 8


async def test_a_partition_fails_with_its_items(engine: Engine) -> None:
    state = await engine.run(playbook(PARTITIONED.replace("ENGINE", "dagster")), {"bad": 30})
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert "partial" in state.latest
    (failed,) = await events(engine, state, "loop.shard.failed")
    assert "1 of 25 items failed: item 30" in failed["error"]
    assert "spoilt" in failed["error"]


async def test_shard_results_are_reduced_by_sql_and_by_spark(engine: Engine) -> None:
    state = await engine.run(
        playbook(
            """
            workflow:
              - step: start
                tool: {kind: python, code: "result = list(range(400))"}
                next: [fan]
              - step: fan
                loop: {in: "{{ start.data }}", iterator: n}
                spec: {loop_mode: fanout, fanout: {max_groups: 4}}
                tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'half': n % 2, 'n': n}"}
                next: {spec: {mode: inclusive}, arcs: [{step: sql}, {step: spark}]}
              - step: sql
                tool:
                  kind: postgres
                  auth: pg
                  command: >
                    SELECT count(*) AS shards, sum((data ->> 'n')::int) AS total FROM noetl.shard_result
                    WHERE execution_id = {{ execution_id }} AND step = 'fan'
              - step: spark
                tool:
                  kind: spark
                  input: {fan: "{{ fan.data }}"}
                  sql: SELECT half, sum(n) AS total FROM fan GROUP BY half ORDER BY half
                  collect: true
            """
        )
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    sql = state.latest["sql"].envelope["data"]["rows"]
    assert [(row["shards"], row["total"]) for row in sql] == [(400, sum(range(400)))]
    spark = state.latest["spark"].envelope["data"]["rows"]
    assert [row["total"] for row in spark] == [sum(range(0, 400, 2)), sum(range(1, 400, 2))]


@pytest.mark.parametrize("victim", ["python worker", pytest.param("executor", marks=pytest.mark.slow)])
async def test_a_killed_process_costs_only_what_was_running(engine: Engine, tmp_path: Path, victim: str) -> None:
    ledger = tmp_path / "ledger.txt"
    parsed = playbook(
        """
        workload: {ledger: ""}
        workflow:
          - step: fan
            loop: {in: "{{ range(80) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {engine: spark, max_concurrent: 4}}
            tool: TOOL
        """.replace("TOOL", written_by("begun > 40"))  # half of the items wait until a worker has been killed
    )
    running = asyncio.create_task(engine.run(parsed, {"ledger": str(ledger)}))
    done = "SELECT current_index FROM noetl.event WHERE event_type = 'loop.shard.done'"
    while len(finished := await engine.runtime.pool.fetch(done)) < 15:
        assert not running.done(), await running
        await asyncio.sleep(0.05)
    worker = int(ledger.read_text().split()[1])
    assert worker != os.getpid()
    jvm = engine.runtime.tool_context.spark().sparkContext._gateway.proc.pid  # in local mode, the only executor too
    os.kill(worker if victim == "python worker" else jvm, signal.SIGKILL)
    finished = await engine.runtime.pool.fetch(done)
    (tmp_path / "go").touch()

    state = await running

    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["fan"].envelope["done"] == 80
    assert_only_unfinished_ran_again(ledger, 80, {row["current_index"] for row in finished})
    assert len(await events(engine, state, "loop.fanin.completed")) == 1
    issued = [row["meta"]["command_id"] for row in await events(engine, state, "command.issued")]
    assert len(issued) == len(set(issued))


async def test_a_cancelled_execution_stops_its_spark_workers(engine: Engine, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.txt"
    parsed = playbook(
        """
        workload: {ledger: ""}
        workflow:
          - step: fan
            loop: {in: "{{ range(200) }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {engine: spark, max_concurrent: 4}}
            tool: TOOL
        """.replace("TOOL", written_by("n % 25 >= 5"))
    )
    execution = await engine.lifecycle.create(parsed, {"ledger": str(ledger)})
    await asyncio.to_thread(engine.runtime.tool_context.spark)  # which takes its time to start
    running = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    done = "SELECT count(*) FROM noetl.event WHERE event_type = 'loop.shard.done'"
    await until(lambda: running.done() or ledger.exists(), "shards on Spark")
    await until(lambda: running.done() or engine.runtime.pool.fetchval(done), "shards that are done")
    assert not running.done(), await running
    await engine.lifecycle.cancel(execution.id, "enough")

    with pytest.raises(ExecutionCancelledError, match="enough"):
        await running
    # one may have begun since
    await until(lambda: all(ended(pid) for _, pid in lines(ledger)), "the end of Spark's Python workers")
    begun = ledger.read_text()
    (tmp_path / "go").touch()  # nobody is there to go on
    state = (await engine.runtime.load(execution.id)).state
    assert state.status is ExecutionStatus.CANCELLED
    assert len(begun.splitlines()) < 200
    tracker = engine.runtime.tool_context.spark().sparkContext.statusTracker()
    await until(lambda: not tracker.getActiveJobsIds(), "the end of the job")
    assert ledger.read_text() == begun
