"""Drivers that are killed at each event of a protocol, and followed by others: every row arrives once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.steps.watermarks import watermarks
from noetl_dagster.settings import Settings
from tests.drivers import driven, killed_at
from tests.engine.conftest import Run
from tests.playbooks import playbook

READ_AGAIN = "{kind: postgres, auth: pg, command: SELECT n FROM source ORDER BY n, as: rows, chunk_size: 100}"
CONTINUED = READ_AGAIN.replace("100}", "100, key: n}")
LOOP = """{kind: python, input: {page: "{{ page }}"}, code: "result = [{'n': n} for n in range(100 * page + 1, min(1051, 100 * page + 101))]"}
    loop: {in: "{{ range(11) }}", iterator: page}"""
STREAM = """
workflow:
  - step: read
    tool: SOURCE
    next: [{step: double, on: call.partial}, {step: count}]
  - step: double
    loop: {spec: {max_in_flight: 2}}
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = [{'n': 2 * row['n']} for row in rows]"}
    next: [{step: load, on: call.partial}]
  - step: load
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = rows"}
    sink: {tool: postgres, auth: pg, table: target}
    next: [count]
  - step: count
    tool: {kind: python, input: {rows: "{{ read.row_count | default(1050) }}", sinks: "{{ load.done }}"}, code: "result = [rows, sinks]"}
"""
AGAIN = """
SELECT claim.node_name, claim.current_index FROM noetl.event AS claim JOIN noetl.event AS done
    USING (execution_id, node_name, current_index)
WHERE claim.event_type = 'command.claimed' AND done.event_type = 'command.completed'
    AND claim.execution_id = $1 AND claim.event_id > done.event_id
"""
COUNTED = """
SELECT result -> 'data' FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.exit' AND node_name = 'count'
"""
ITEMS = 600
FANOUT = f"""
workflow:
  - step: fan
    loop: {{in: "{{{{ range({ITEMS}) }}}}", iterator: n}}
    spec: {{loop_mode: fanout}}
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = {{'n': n}}"}}
    sink: {{tool: postgres, auth: pg, table: target}}
"""
COUNTS = """
SELECT event_type, count(*), count(DISTINCT current_index) AS items FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('loop.shard.enqueued', 'command.issued', 'loop.shard.done') GROUP BY 1
"""
LOAD = """
workflow:
  - step: load
    state: {key: n, initial: 0}
    tool:
      kind: postgres
      auth: pg
      input: {since: "{{ state.value }}"}
      command: SELECT n FROM source WHERE n > :since
    sink: {tool: postgres, auth: pg, table: target}
"""


@pytest.fixture(autouse=True)
async def tables(pool: asyncpg.Pool[Any]) -> None:
    """A source of rows, and an empty target."""
    await pool.execute(
        "CREATE TABLE source AS SELECT n FROM generate_series(1, 1050) AS n; CREATE TABLE target (n int)"
    )


async def loaded(pool: asyncpg.Pool[Any]) -> list[int]:
    return [row["n"] for row in await pool.fetch("SELECT n FROM target ORDER BY n")]


def event(type_: str, step: str, number: int | None = None) -> str:
    condition = f"NEW.event_type = '{type_}' AND NEW.node_name = '{step}'"
    if number is not None:
        condition += f" AND COALESCE((NEW.meta ->> 'chunk_index')::int, NEW.current_index) = {number}"
    return condition


@pytest.mark.parametrize(
    ("source", "conditions"),
    [
        pytest.param(
            READ_AGAIN,
            [event("call.partial", "read", 5), event("command.claimed", "load", 5), event("step.exit", "read")],
            id="read again",
        ),
        pytest.param(
            CONTINUED,
            [
                event("call.partial", "read", 5),
                event("command.issued", "double", 6),
                event("command.completed", "load", 7),  # in the transaction of the sink
            ],
            id="continued",
        ),
        pytest.param(
            LOOP,
            [event("call.partial", "double", 4), event("command.completed", "double", 6), event("step.exit", "load")],
            id="made by iterations",
        ),
    ],
)
async def test_a_stream(
    source: str, conditions: list[str], engine: Engine, settings: Settings, pool: asyncpg.Pool[Any], tmp_path: Path
) -> None:
    created = await engine.lifecycle.create(playbook(STREAM.replace("SOURCE", source)))
    reached = [one async for one in killed_at(conditions, settings, created.id, tmp_path, pool)]
    assert sorted(reached) == sorted(conditions)
    await driven(settings, created.id, tmp_path)
    assert await loaded(pool) == [2 * n for n in range(1, 1051)]
    assert await pool.fetchval(COUNTED, created.id) == [1050, 11]
    assert await pool.fetch(AGAIN, created.id) == [], "what was done is not done again"


async def test_a_fan_out(engine: Engine, settings: Settings, pool: asyncpg.Pool[Any], tmp_path: Path) -> None:
    """While others run, and in the transaction of a sink."""
    own = settings.model_copy(update={"run_processes": 2})
    created = await engine.lifecycle.create(playbook(FANOUT))
    conditions = [event("loop.shard.done", "fan", 200), event("command.issued", "fan", 450)]
    async for _ in killed_at(conditions, own, created.id, tmp_path, pool):
        assert len(await loaded(pool)) < ITEMS
    await driven(own, created.id, tmp_path)
    counts = {row["event_type"]: (row["count"], row["items"]) for row in await pool.fetch(COUNTS, created.id)}
    types = ("command.issued", "loop.shard.done", "loop.shard.enqueued")
    assert counts == dict.fromkeys(types, (ITEMS, ITEMS))
    assert await loaded(pool) == list(range(ITEMS))
    assert (await engine.runtime.load(created.id)).state.epoch == 4  # one for its creation, and one for each driver


async def test_an_incremental_load(
    engine: Engine, run: Run, settings: Settings, pool: asyncpg.Pool[Any], tmp_path: Path
) -> None:
    """Rows and watermark are there together, or neither."""
    created = await engine.lifecycle.create(playbook(LOAD))
    conditions = [event("command.completed", "load"), event("step.exit", "load")]
    left = [
        (len(await loaded(pool)), [one.value for one in await watermarks(pool, "tests/sample")])
        async for _ in killed_at(conditions, settings, created.id, tmp_path, pool)
    ]
    assert left == [(0, []), (1050, [1050])]

    await driven(settings, created.id, tmp_path)
    await pool.execute("INSERT INTO source VALUES (1051)")
    assert (await run(LOAD)).error is None
    assert await loaded(pool) == list(range(1, 1052))
    assert [one.value for one in await watermarks(pool, "tests/sample")] == [1051]
