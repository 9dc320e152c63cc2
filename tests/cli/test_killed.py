"""Runs that are killed at each event of a protocol, and resumed: every row arrives once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.steps.watermarks import watermarks
from tests.cli.conftest import Cli
from tests.cli.kills import killed_at, resumed
from tests.playbooks import text_of

READ_AGAIN = "{kind: postgres, auth: pg, command: SELECT n FROM source ORDER BY n, as: rows, chunk_size: 100}"
CONTINUED = READ_AGAIN.replace("100}", "100, key: n}")
LOOP = """{kind: python, input: {page: "{{ page }}"}, code: "result = [{'n': n} for n in range(100 * page + 1, min(1051, 100 * page + 101))]"}
    loop: {in: "{{ range(11) }}", iterator: page}"""
STREAM = text_of(
    "orders",
    """
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
    """,
)
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
ITEMS = 1_300
FANOUT = text_of(
    "items",
    f"""
    workflow:
      - step: fan
        loop: {{in: "{{{{ range({ITEMS}) }}}}", iterator: n}}
        spec: {{loop_mode: fanout}}
        tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = {{'n': n}}"}}
        sink: {{tool: postgres, auth: pg, table: target}}
    """,
)
COUNTS = """
SELECT event_type, count(*), count(DISTINCT current_index) AS items FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('loop.shard.enqueued', 'command.issued', 'loop.shard.done') GROUP BY 1
"""
LOAD = text_of(
    "load",
    """
    workflow:
      - step: load
        state: {key: n, initial: 0}
        tool:
          kind: postgres
          auth: pg
          input: {since: "{{ state.value }}"}
          command: SELECT n FROM source WHERE n > :since
        sink: {tool: postgres, auth: pg, table: target}
    """,
)


@pytest.fixture(autouse=True)
async def tables(environment: dict[str, str], pool: asyncpg.Pool[Any]) -> None:
    """A source of rows, and an empty target, which a sink's default credential reaches."""
    environment["NOETL_DEFAULT_POSTGRES_CREDENTIAL"] = "embedded"
    await pool.execute(
        "CREATE TABLE source AS SELECT n FROM generate_series(1, 1050) AS n; CREATE TABLE target (n int)"
    )


async def loaded(pool: asyncpg.Pool[Any]) -> list[int]:
    return [row["n"] for row in await pool.fetch("SELECT n FROM target ORDER BY n")]


@pytest.mark.parametrize(
    ("source", "type_", "step", "number"),
    [
        pytest.param(CONTINUED, "command.issued", "double", 5, id="a command is issued ahead"),
        pytest.param(LOOP, "command.completed", "double", 5, id="an iteration and its chunk"),
        pytest.param(READ_AGAIN, "command.claimed", "load", 5, id="a claim, with the end or before it"),
        pytest.param(READ_AGAIN, "call.partial", "read", 5, id="a chunk of what is read again"),
        pytest.param(CONTINUED, "call.partial", "read", 5, id="a chunk of what is continued"),
        pytest.param(LOOP, "call.partial", "double", 5, id="what was made of a chunk"),
        pytest.param(CONTINUED, "command.completed", "load", 5, id="in the transaction of a sink"),
        pytest.param(READ_AGAIN, "step.exit", "read", None, id="before the source's end"),
        pytest.param(LOOP, "step.exit", "load", None, id="before the sink's end"),
    ],
)
async def test_a_stream(
    source: str,
    type_: str,
    step: str,
    number: int | None,
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    file = tmp_path / "orders.yaml"
    file.write_text(STREAM.replace("SOURCE", source))
    condition = f"NEW.event_type = '{type_}' AND NEW.node_name = '{step}'"
    if number is not None:
        condition += f" AND COALESCE((NEW.meta ->> 'chunk_index')::int, NEW.current_index) = {number}"
    execution_id = await killed_at(condition, ["run", str(file)], environment, tmp_path, pool)
    await resumed(cli, execution_id)
    assert await loaded(pool) == [2 * n for n in range(1, 1051)]
    assert await pool.fetchval(COUNTED, execution_id) == [1050, 11]
    assert await pool.fetch(AGAIN, execution_id) == [], "what was done is not done again"


@pytest.mark.parametrize(
    ("type_", "item", "processes"),
    [
        pytest.param("command.issued", 700, 1, id="while others run"),
        pytest.param("loop.shard.done", 450, 2, id="in the transaction of a sink"),
    ],
)
async def test_a_fan_out(
    type_: str,
    item: int,
    processes: int,
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    environment["NOETL_RUN_PROCESSES"] = str(processes)
    file = tmp_path / "items.yaml"
    file.write_text(FANOUT)
    condition = f"NEW.event_type = '{type_}' AND NEW.current_index = {item}"
    execution_id = await killed_at(condition, ["run", str(file)], environment, tmp_path, pool)
    assert (await resumed(cli, execution_id))["epoch"] == 2
    counts = {row["event_type"]: (row["count"], row["items"]) for row in await pool.fetch(COUNTS, execution_id)}
    types = ("command.issued", "loop.shard.done", "loop.shard.enqueued")
    assert counts == dict.fromkeys(types, (ITEMS, ITEMS))
    assert await loaded(pool) == list(range(ITEMS))


@pytest.mark.parametrize(
    ("event", "left"),
    [
        pytest.param("command.completed", (0, []), id="between the rows and the end of their command"),
        pytest.param("step.exit", (1050, [1050]), id="before the step's end"),
    ],
)
async def test_an_incremental_load(
    event: str,
    left: tuple[int, list[int]],
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    """Rows and watermark are there together, or neither."""
    file = tmp_path / "load.yaml"
    file.write_text(LOAD)
    execution_id = await killed_at(f"NEW.event_type = '{event}'", ["run", str(file)], environment, tmp_path, pool)
    assert (len(await loaded(pool)), [one.value for one in await watermarks(pool, "tests/load")]) == left

    await resumed(cli, execution_id)
    await pool.execute("INSERT INTO source VALUES (1051)")
    again = await asyncio.to_thread(cli, "run", str(file), "--json")
    assert json.loads(again.stdout)["status"] == "COMPLETED", again.stderr
    assert await loaded(pool) == list(range(1, 1052))
    assert [one.value for one in await watermarks(pool, "tests/load")] == [1051]
