"""Drivers that are killed again and again while they fill sinks: what comes out is there once and whole."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import duckdb

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.drivers import driven, killed_when
from tests.playbooks import playbook

SINKS = """
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
"""
ENDED = "SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed' HAVING count(*) >= $1"


async def test_drivers_that_are_killed(
    engine: Engine, settings: Settings, pool: asyncpg.Pool[Any], tmp_path: Path
) -> None:
    items, kills = 40, 2
    await pool.execute(f"CREATE TABLE chores AS SELECT n, 'new' AS state FROM generate_series(0, {items - 1}) AS n")
    created = await engine.lifecycle.create(playbook(SINKS), {"folder": str(tmp_path), "items": items})
    chances = random.Random(items)
    for _ in range(kills):
        ended = await pool.fetchval(ENDED, 0) + chances.randint(1, items // kills // 2)
        await killed_when(partial(pool.fetchval, ENDED, ended), settings, created.id, tmp_path)
    await driven(settings, created.id, tmp_path)

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
