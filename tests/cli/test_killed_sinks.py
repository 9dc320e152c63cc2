"""Runs that are killed again and again while they fill sinks: what comes out is there once and whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import asyncpg
import duckdb

from tests.cli.conftest import Cli
from tests.cli.kills import resumed
from tests.forked import Forked
from tests.playbooks import text_of
from tests.waiting import until

SINKS = text_of(
    "sinks",
    """
    workload: {folder: "", items: 1}
    workflow:
      - step: start
        tool: {kind: noop}
        next: {spec: {mode: inclusive}, arcs: [{step: files}, {step: rows}, {step: chores}]}
      - step: files
        loop: {in: "{{ range(items) }}", iterator: n, spec: {mode: parallel, max_in_flight: 2}}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n}"}
        sink: {tool: file, path: "{{ folder }}/files"}
      - step: rows
        loop: {in: "{{ range(items) }}", iterator: n, spec: {mode: parallel, max_in_flight: 2}}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n}"}
        sink: {tool: duckdb, database: "{{ folder }}/rows.duckdb", table: numbers}
      - step: chores
        loop:
          cursor:
            kind: postgres
            auth: pg
            claim: |
              UPDATE chores SET state = 'claimed' WHERE n IN (
                SELECT n FROM chores WHERE state = 'new' LIMIT 5 FOR UPDATE SKIP LOCKED) RETURNING n
            release: UPDATE chores SET state = 'new' WHERE n = :n
          iterator: claimed
          spec: {mode: cursor, max_in_flight: 2, frame: {process: frame}}
        tool: {kind: python, input: {claimed: "{{ claimed }}"}, code: "result = claimed"}
        sink: {tool: file, path: "{{ folder }}/chores", format: jsonl}
    """,
)
ENDED = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed'"


async def test_runs_that_are_killed(
    cli: Cli, environment: dict[str, str], pool: asyncpg.Pool[Any], tmp_path: Path
) -> None:
    items, kills = 40, 2
    environment["NOETL_DEFAULT_POSTGRES_CREDENTIAL"] = "embedded"
    await pool.execute(f"CREATE TABLE chores AS SELECT n, 'new' AS state FROM generate_series(0, {items - 1}) AS n")
    file = tmp_path / "sinks.yaml"
    file.write_text(SINKS)
    command = ["run", str(file), "--set", f"folder={tmp_path}", "--set", f"items={items}"]
    chances = random.Random(items)
    for _ in range(kills):
        before = await pool.fetchval(ENDED)
        await _killed(command, environment, tmp_path, pool, before + chances.randint(1, items // kills // 2))
        execution_id = await pool.fetchval("SELECT max(execution_id) FROM noetl.event")
        command = ["resume", str(execution_id)]

    await resumed(cli, execution_id)

    expected = [(n,) for n in range(items)]
    parts, chores = f"read_parquet('{tmp_path}/files/*.parquet')", f"read_json('{tmp_path}/chores/*.jsonl')"
    assert duckdb.sql(f"SELECT n FROM {parts} ORDER BY n").fetchall() == expected
    assert duckdb.sql(f"SELECT n FROM {chores} ORDER BY n").fetchall() == expected
    with duckdb.connect(str(tmp_path / "rows.duckdb")) as connection:
        assert connection.execute("SELECT n FROM numbers ORDER BY n").fetchall() == expected
    assert staged(tmp_path) == []
    assert await pool.fetchval("SELECT count(*) FROM noetl.cursor_frame") == 0
    assert await pool.fetchval("SELECT count(*) FROM chores WHERE state = 'new'") == 0


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("_staged/*") if path.is_file()]


async def _killed(
    command: list[str], environment: dict[str, str], folder: Path, pool: asyncpg.Pool[Any], ended: int
) -> None:
    """Starts a process and kills it when so many commands have ended."""
    process = Forked("noetl-dagster", *command, environment=environment, folder=folder, output=folder / "killed.txt")

    async def enough() -> bool:
        assert process.poll() is None, "it was to be killed before its end"
        return bool(await pool.fetchval(ENDED) >= ended)

    try:
        await until(enough, f"{ended} commands to end")
    finally:
        process.kill()
