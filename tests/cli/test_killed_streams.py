"""Streams whose process is killed at each of their places: every row arrives once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.cli.conftest import Cli
from tests.cli.kills import killed_at
from tests.playbooks import text_of

SELECT = "{kind: postgres, auth: pg, command: SELECT n FROM source ORDER BY n, as: rows, chunk_size: 100 KEY}"
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


READ_AGAIN, CONTINUED = SELECT.replace(" KEY", ""), SELECT.replace(" KEY", ", key: n")


@pytest.mark.parametrize("source", [READ_AGAIN, CONTINUED, LOOP], ids=["read again", "continued", "loop"])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("command.issued", "double", 5), id="a command is issued ahead"),
        pytest.param(("command.completed", "double", 5), id="an iteration and its chunk"),
        pytest.param(("command.claimed", "load", 5), id="a claim, with the end or before it"),
        pytest.param(("call.partial", "read", 5), id="a chunk is told of"),
        pytest.param(("call.partial", "double", 5), id="what was made of it is"),
        pytest.param(("command.completed", "load", 5), id="in the transaction of a sink"),
        pytest.param(("step.exit", "read", None), id="before the source's end"),
        pytest.param(("step.exit", "load", None), id="before the sink's end"),
    ],
)
async def test_each_row_arrives_once(
    place: tuple[str, str, int | None],
    source: str,
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    environment["NOETL_DEFAULT_POSTGRES_CREDENTIAL"] = "embedded"
    await pool.execute("CREATE TABLE source AS SELECT n FROM generate_series(1, 1050) AS n")
    await pool.execute("CREATE TABLE target (n int)")
    file = tmp_path / "orders.yaml"
    file.write_text(STREAM.replace("SOURCE", source))
    type_, step, number = place
    condition = f"NEW.event_type = '{type_}' AND NEW.node_name = '{step}'"
    if number is not None:
        condition += f" AND COALESCE((NEW.meta ->> 'chunk_index')::int, NEW.current_index) = {number}"
    await killed_at(condition, ["run", str(file)], environment, tmp_path, pool)
    execution_id = await pool.fetchval("SELECT max(execution_id) FROM noetl.event")
    resumed = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
    assert json.loads(resumed.stdout)["status"] == "COMPLETED", resumed.stderr
    rows = await pool.fetch("SELECT n FROM target ORDER BY n")
    assert [row["n"] for row in rows] == [2 * n for n in range(1, 1051)]
    assert await pool.fetchval(COUNTED, execution_id) == [1050, 11]
    assert await pool.fetch(AGAIN, execution_id) == [], "what was done is not done again"
