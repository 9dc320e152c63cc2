"""Incremental loads whose process is killed around the sink: rows and watermark are there together, or neither."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.steps.watermarks import watermarks
from tests.cli.conftest import COMMAND, Cli
from tests.playbooks import text_of
from tests.waiting import until

LOCK = 4711
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
HOLD = f"""
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NEW; END $$;
CREATE TRIGGER hold BEFORE INSERT ON noetl.event FOR EACH ROW WHEN (NEW.event_type = 'EVENT')
EXECUTE FUNCTION hold();
"""
WAITING = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {LOCK} AND NOT granted"


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
    await pool.execute(HOLD.replace("EVENT", event))
    file = tmp_path / "load.yaml"
    file.write_text(LOAD)
    async with pool.acquire() as holder:
        await holder.execute("SELECT pg_advisory_lock($1)", LOCK)
        await _killed_when_it_waits(["run", str(file)], environment, tmp_path, pool)
        await holder.execute("SELECT pg_advisory_unlock($1)", LOCK)

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


async def _killed_when_it_waits(
    command: list[str], environment: dict[str, str], folder: Path, pool: asyncpg.Pool[Any]
) -> None:
    """Starts a process, kills it when its database waits for the lock, and what it had open there."""
    said = folder / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220
            [*COMMAND, *command],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def waits() -> bool:
        assert process.poll() is None, said.read_text()
        return await pool.fetchval(WAITING) is not None

    try:
        await until(waits, "the lock to be waited for")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    await pool.execute(f"SELECT pg_terminate_backend(pid) FROM ({WAITING}) AS waiting")

    async def gone() -> bool:
        return await pool.fetchval(WAITING) is None

    await until(gone, "its transactions to end")
