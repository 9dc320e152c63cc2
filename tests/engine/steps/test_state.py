"""Incremental loads: where a step goes on from, and what of a run counts for the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.steps.watermarks import set_watermark, watermarks
from noetl_dagster.errors import ToolError
from noetl_dagster.events.queries import WATERMARK
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.assets import Partition, PartitionKey
from noetl_dagster.tools.sinks.parts import PartSinks
from tests.engine.conftest import Run
from tests.playbooks import playbook
from tests.waiting import until

PATH = "tests/sample"


def day(n: int) -> str:
    return f"2026-01-{n:02d}T00:00:00+00:00"


SELECT = """
      tool:
        kind: postgres
        auth: pg
        input: {since: "{{ state.value }}"}
        command: SELECT n, changed FROM source WHERE changed > :since ORDER BY n
"""
STATE = 'state: {key: changed, initial: "1970-01-01T00:00:00Z"}'
SINK = "sink: {tool: postgres, auth: pg, table: target}"

LOAD = f"""
workflow:
    - step: load
      {STATE}
      {SELECT}
      {SINK}
"""

BY_A_LATER_STEP = f"""
workload: {{table: target}}
workflow:
    - step: load
      {STATE}
      {SELECT}
      next: [write]
    - step: write
      tool:
        kind: postgres
        auth: pg
        input: {{rows: "{{{{ load.rows | tojson }}}}"}}
        command: |
          INSERT INTO {{{{ table }}}}
          SELECT * FROM jsonb_to_recordset(:rows::jsonb) AS r (n int, changed timestamptz)
"""

EACH = f"""
workload: {{partial: false, sink: "target"}}
workflow:
    - step: each
      {STATE}
      loop: {{in: [1, 0], iterator: odd, spec: {{mode: parallel, allow_partial: "{{{{ partial }}}}"}}}}
      tool:
        kind: postgres
        auth: pg
        input: {{since: "{{{{ state.value }}}}", odd: "{{{{ odd }}}}"}}
        command: SELECT n, changed FROM source WHERE changed > :since AND n % 2 = :odd
      sink: {{tool: postgres, auth: pg, table: "{{{{ sink if odd else 'target' }}}}"}}
"""


@pytest.fixture(autouse=True)
async def tables(pool: asyncpg.Pool[Any]) -> None:
    await pool.execute("CREATE TABLE source (n int, changed timestamptz)")
    await pool.execute("CREATE TABLE target (n int, changed timestamptz)")
    await add(pool, 1, 2, 3)


async def add(pool: asyncpg.Pool[Any], *numbers: int) -> None:
    """Rows of the source; ``n`` was changed on the n-th day of January."""
    await pool.executemany(
        "INSERT INTO source VALUES ($1, '2025-12-31T00:00:00Z'::timestamptz + $1::int * interval '1 day')",
        [(n,) for n in numbers],
    )


async def loaded(pool: asyncpg.Pool[Any]) -> list[int]:
    return [row["n"] for row in await pool.fetch("SELECT n FROM target ORDER BY n")]


async def stands(pool: asyncpg.Pool[Any], path: str = PATH) -> dict[str, Any]:
    return {one.name + one.partition: one.value for one in await watermarks(pool, path)}


async def test_each_run_loads_what_is_new(run: Run, pool: asyncpg.Pool[Any]) -> None:
    first = await run(LOAD)
    assert await loaded(pool) == [1, 2, 3]
    assert first.watermarks[("load", 1)]["first"]
    again = await run(LOAD)  # there is nothing new
    assert again.ends[("load", 1)].watermark is None
    await add(pool, 4, 5)
    third = await run(LOAD)
    assert await loaded(pool) == [1, 2, 3, 4, 5]
    assert await stands(pool) == {"load": day(5)}
    assert not third.watermarks[("load", 1)]["first"]
    moved = third.ends[("load", 1)].watermark
    assert moved is not None
    assert (moved["value"], moved["previous"]) == (day(5), day(3))


async def test_rows_for_later_steps_count_when_the_execution_completes(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any]
) -> None:
    failed = await run(BY_A_LATER_STEP, table="missing")
    assert failed.status == "FAILED"
    assert await stands(pool) == {}
    await run(BY_A_LATER_STEP)
    assert (await loaded(pool), await stands(pool)) == ([1, 2, 3], {"load": day(3)})
    await add(pool, 4)
    await pool.execute("CREATE TABLE missing (n int, changed timestamptz)")
    await engine.resume(failed.execution_id)  # with the rows that it had read
    assert await pool.fetchval("SELECT array_agg(n) FROM missing") == [1, 2, 3]
    assert await stands(pool) == {"load": day(3)}


ALLOW = STATE.replace("}", ", concurrent: allow}")


async def test_a_resumed_execution_goes_on_from_where_it_began_if_others_may_load_too(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any]
) -> None:
    text = LOAD.replace(STATE, ALLOW)
    await pool.execute("ALTER TABLE target ADD CONSTRAINT small CHECK (n < 4)")
    await run(text)
    await add(pool, 4)
    failed = await run(text)
    assert failed.status == "FAILED"
    await pool.execute("ALTER TABLE target DROP CONSTRAINT small")
    await run(text)
    assert await loaded(pool) == [1, 2, 3, 4]
    await add(pool, 5)
    resumed = await engine.resume(failed.execution_id)
    assert resumed.status == "COMPLETED"
    assert resumed.watermarks[("load", 1)]["value"] == day(3)
    assert await loaded(pool) == [1, 2, 3, 4, 4, 5]
    assert await stands(pool) == {"load": day(5)}


@pytest.mark.parametrize(("sink", "counts"), [(SINK, {"load": day(3)}), ("", {})])
async def test_a_cancelled_execution_counts_as_far_as_its_sink_is_written(
    sink: str, counts: dict[str, str], engine: Engine, pool: asyncpg.Pool[Any]
) -> None:
    text = f"""
workflow:
    - step: load
      {STATE}
      {SELECT}
      {sink}
      next: [wait]
    - step: wait
      tool: {{kind: shell, cmd: sleep 600}}
"""
    walking = asyncio.create_task(engine.run(playbook(text)))
    began = "SELECT execution_id FROM noetl.event WHERE node_name = 'wait' AND event_type = 'command.claimed'"
    execution_id = await until(lambda: pool.fetchval(began), "the later step to begin")
    await engine.lifecycle.cancel(execution_id, "enough")
    assert (await walking).status == "CANCELLED"
    assert await stands(pool) == counts


@pytest.mark.parametrize("partial", [True, False])
async def test_a_loop_that_misses_an_iteration_stays(
    partial: bool, engine: Engine, run: Run, pool: asyncpg.Pool[Any]
) -> None:
    state = await run(EACH, sink="missing", partial=partial)
    assert state.status == ("COMPLETED" if partial else "FAILED")
    assert await loaded(pool) == [2]
    assert await stands(pool) == {}
    if partial:
        warning = await pool.fetchval("SELECT error FROM noetl.event WHERE event_type = 'warning'")
        assert "its watermark stays, since 1 iterations failed" in warning
        return
    await pool.execute("CREATE TABLE missing (n int, changed timestamptz)")
    resumed = await engine.resume(state.execution_id)  # which runs the failed iteration alone
    assert resumed.status == "COMPLETED"
    assert await pool.fetchval("SELECT array_agg(n) FROM missing") == [1, 3]
    assert (await loaded(pool), await stands(pool)) == ([2], {"each": day(3)})


@pytest.mark.parametrize("mode", ["parallel", "sequential", "fanout"])
async def test_a_loop_goes_as_far_as_its_furthest_iteration(mode: str, run: Run, pool: asyncpg.Pool[Any]) -> None:
    text = EACH.replace('spec: {mode: parallel, allow_partial: "{{ partial }}"}', f"mode: {mode}")
    await run(text)
    assert (await loaded(pool), await stands(pool)) == ([1, 2, 3], {"each": day(3)})
    await add(pool, 4)
    await run(text)
    assert (await loaded(pool), await stands(pool)) == ([1, 2, 3, 4], {"each": day(4)})


PAGES = """
workflow:
  - step: pages
    state: {key: n, initial: 0}
    tool:
      kind: python
      input: {page: 1}
      code: |
        result = {"rows": [{"n": 10 * int(page)}], "page": int(page)}
      retry:
        - when: "{{ output.page < 3 }}"
          then: {max_attempts: 5, next_call: {input: {page: "{{ output.page + 1 }}"}},
                 collect: {strategy: append, path: rows}}
    sink: {tool: postgres, auth: pg, command: "INSERT INTO numbers VALUES (:n)", args: {n: "{{ result.rows[0].n }}"}}
"""


async def test_pages_count_when_all_are_there(engine: Engine, run: Run, pool: asyncpg.Pool[Any]) -> None:
    await pool.execute("CREATE TABLE numbers (n int CONSTRAINT small CHECK (n < 30))")
    failed = await run(PAGES)
    assert failed.status == "FAILED"
    assert await pool.fetchval("SELECT array_agg(n ORDER BY n) FROM numbers") == [10, 20]
    assert await stands(pool) == {}
    await pool.execute("ALTER TABLE numbers DROP CONSTRAINT small")
    resumed = await engine.resume(failed.execution_id)
    assert resumed.error is None
    assert await pool.fetchval("SELECT array_agg(n ORDER BY n) FROM numbers") == [10, 20, 30]
    assert await stands(pool) == {"pages": 30}


CYCLE = """
workflow:
  - step: next
    state: {key: "{{ output.at }}", initial: 0}
    tool: {kind: python, input: {at: "{{ state.value }}"}, code: "result = {'at': at + 1}"}
    next:
      arcs:
        - {step: next, when: "{{ state.reached < 3 }}"}
"""


async def test_each_visit_of_a_cycle_goes_on_from_the_one_before(run: Run, pool: asyncpg.Pool[Any]) -> None:
    state = await run(CYCLE)
    assert state.error is None
    assert state.visits["next"] == 3
    assert await stands(pool) == {"next": 3}
    await run(CYCLE)
    assert await stands(pool) == {"next": 4}


async def test_steps_of_one_name_share_it(run: Run, pool: asyncpg.Pool[Any]) -> None:
    shared = """
workload: {tenant: a}
workflow:
  - step: one
    state: &state {key: n, initial: "{{ 5 if tenant == 'a' else 50 }}", name: "orders {{ tenant }}"}
    tool: &tool {kind: python, input: {n: "{{ state.value }}"}, code: "result = [{'n': n + 1}]"}
    next: [two]
  - step: two
    state: *state
    tool: *tool
"""
    await run(shared)
    await run(shared, tenant="b")
    assert await stands(pool) == {"orders a": 7, "orders b": 52}


async def test_one_for_each_partition(engine: Engine, pool: asyncpg.Pool[Any]) -> None:
    async def run(key: str, n: int) -> ExecutionState:
        text = f"""
dagster: {{partitions: {{kind: static, static: [a, b], workload: part}}}}
workload: {{part: a}}
workflow:
  - step: load
    state: {{key: n, initial: 0}}
    tool: {{kind: python, code: "result = [{{'n': {n}}}]"}}
"""
        partition = Partition(key=key, parts={"partition": PartitionKey(key=key)})
        execution = await engine.lifecycle.create(playbook(text), partition=partition)
        await engine.guard(execution, engine.walker.run(execution))
        return execution.state

    await run("b", 9)
    second = await run("a", 2)
    assert second.watermarks[("load", 1)]["value"] == 0
    assert await stands(pool) == {"loada": 2, "loadb": 9}


async def test_a_staged_sink_counts_when_it_is_published(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LOAD.replace(SINK, f"sink: {{tool: file, path: {tmp_path}/rows, format: jsonl}}")

    async def refused(*_: Any, **__: Any) -> None:
        raise ToolError("the disk is away", kind="storage")

    with monkeypatch.context() as patched:
        patched.setattr(PartSinks, "publish", refused)
        patched.setattr(PartSinks, "publish_staged", refused)
        failed = await run(text)
    assert failed.status == "FAILED"
    assert await pool.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed'") == 1
    assert await stands(pool) == {}
    resumed = await engine.resume(failed.execution_id)
    assert resumed.error is None
    assert await stands(pool) == {"load": day(3)}
    await add(pool, 4)
    await run(text)
    rows = duckdb.sql(f"SELECT n FROM read_json('{tmp_path}/rows/*.jsonl') ORDER BY n").fetchall()
    assert rows == [(1,), (2,), (3,), (4,)]


async def test_child_playbooks_have_their_own(run: Run, pool: asyncpg.Pool[Any], tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(
        "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: child, path: tests/child}\n"
        "workflow:\n  - step: load\n    state: {key: n, initial: 0}\n"
        "    tool: {kind: python, code: \"result = [{'n': 4}]\"}\n"
    )
    await run(f"""
workflow:
  - step: call
    tool: {{kind: playbook, path: {child}}}
""")
    assert await stands(pool) == {}
    assert await stands(pool, "tests/child") == {"load": 4}


async def test_set_by_hand_goes_before_what_runs_had_loaded(engine: Engine, run: Run, pool: asyncpg.Pool[Any]) -> None:
    failed = await run(BY_A_LATER_STEP, table="missing")
    await run(BY_A_LATER_STEP)
    before = await set_watermark(engine.runtime.log, PATH, "load", day(1))
    assert before is not None
    assert before.value == day(3)
    await pool.execute("CREATE TABLE missing (n int, changed timestamptz)")
    await engine.resume(failed.execution_id)  # began before, and loaded up to the third
    assert await stands(pool) == {"load": day(1)}
    await pool.execute("TRUNCATE target")
    await run(BY_A_LATER_STEP)
    assert (await loaded(pool), await stands(pool)) == ([2, 3], {"load": day(3)})
    await set_watermark(engine.runtime.log, PATH, "load", None)
    assert await stands(pool) == {"load": None}
    await pool.execute("TRUNCATE target")
    state = await run(BY_A_LATER_STEP)
    assert state.watermarks[("load", 1)]["first"]
    assert await loaded(pool) == [1, 2, 3]


async def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any]
) -> None:
    await set_watermark(engine.runtime.log, PATH, "load", 3)
    with pytest.raises(ToolError, match="3 and 'x' cannot be compared"):
        await set_watermark(engine.runtime.log, PATH, "load", "x")
    state = await run(LOAD)
    assert state.status == "FAILED"
    assert f"step load: '{day(3)}' and 3 cannot be compared" in (state.error or "")
    assert await loaded(pool) == []


async def test_a_column_that_no_row_has(run: Run, pool: asyncpg.Pool[Any]) -> None:
    state = await run(LOAD.replace("key: changed", "key: updated"))
    assert "no row of the result has the column 'updated' of state.key; columns: n, changed" in str(state.error)
    assert await loaded(pool) == []


async def test_the_latest_is_found_by_its_index(run: Run, pool: asyncpg.Pool[Any]) -> None:
    await run(LOAD)
    async with pool.acquire() as connection:
        await connection.execute("SET enable_seqscan = off; SET enable_sort = off")
        plan = await connection.fetch(f"EXPLAIN {WATERMARK}", PATH, "load", "", 0)
    text = "\n".join(row[0] for row in plan)
    assert "Merge Append" in text  # of each month its first, none of which is sorted
    assert "Sort  (" not in text
