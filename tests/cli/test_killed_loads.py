"""Incremental loads whose process is killed around the sink: rows and watermark are there together, or neither."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.steps.watermarks import watermarks
from tests.cli.conftest import Cli
from tests.cli.kills import killed_at
from tests.playbooks import text_of

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


@pytest.mark.parametrize(
    ("event", "left"),
    [
        pytest.param("command.completed", (0, []), id="between the rows and the end of their command"),
        pytest.param("step.exit", (3, [3]), id="before the step's end"),
    ],
)
async def test_a_load_that_is_killed(
    event: str,
    left: tuple[int, list[int]],
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    environment["NOETL_DEFAULT_POSTGRES_CREDENTIAL"] = "embedded"
    await pool.execute("CREATE TABLE source AS SELECT n FROM generate_series(1, 3) AS n")
    await pool.execute("CREATE TABLE target (n int)")
    file = tmp_path / "load.yaml"
    file.write_text(LOAD)
    await killed_at(f"NEW.event_type = '{event}'", ["run", str(file)], environment, tmp_path, pool)

    there = await pool.fetchval("SELECT count(*) FROM target")
    assert (there, [one.value for one in await watermarks(pool, "tests/load")]) == left

    execution_id = await pool.fetchval("SELECT max(execution_id) FROM noetl.event")
    resumed = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
    assert json.loads(resumed.stdout)["status"] == "COMPLETED", resumed.stderr
    await pool.execute("INSERT INTO source VALUES (4)")
    again = await asyncio.to_thread(cli, "run", str(file), "--json")
    assert json.loads(again.stdout)["status"] == "COMPLETED", again.stderr
    assert await pool.fetchval("SELECT array_agg(n ORDER BY n) FROM target") == [1, 2, 3, 4]
    assert [one.value for one in await watermarks(pool, "tests/load")] == [4]
