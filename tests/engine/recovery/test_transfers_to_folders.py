"""Transfers into folders whose process is killed: who goes on has each row once, and readers never see half."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.engine.recovery.killed import EXECUTION, die, killed
from tests.playbooks import playbook

pytestmark = pytest.mark.long

ROWS = 4_000
MOVE = """
workflow:
  - step: move
    tool:
      kind: transfer
      source: {source}
      target: {{path: {folder}/lake/}}
      mode: {mode}
      chunk_size: 600
      resumable: {resumable}
      verify: checksum
"""
SOURCES = {
    "postgres": "{kind: postgres, table: numbers, order_by: id, auth: pg}",
    "jsonl": "{path: FOLDER/rows.jsonl}",
    "query": "{kind: postgres, query: 'select * from numbers', auth: pg}",
}


def die_in_transfer(method: str, times: int) -> None:
    """Dies when a transfer calls a method for the so many-th time, or after its only run."""
    from noetl_dagster.tools.transfer import folders

    seen: Counter[str] = Counter()
    place = folders.obstore if method == "copy_async" else folders.StagedFolder
    real = getattr(place, method)

    async def counted(*arguments: Any, **named: Any) -> Any:
        seen[method] += 1
        if method == "run":
            await real(*arguments, **named)
        if seen[method] == times:
            die()
        return await real(*arguments, **named)

    setattr(place, method, counted)


@pytest.fixture
async def numbers(pool: asyncpg.Pool) -> asyncpg.Pool:
    await pool.execute(
        f"CREATE TABLE numbers AS SELECT n AS id, 'n ' || n AS name, n::text AS more FROM generate_series(1, {ROWS}) n"
    )
    return pool


@pytest.mark.parametrize(
    ("kind", "mode", "method", "times", "seen"),
    [
        pytest.param("postgres", "replace", "_store", 4, 1, id="while parts are staged"),
        pytest.param("postgres", "replace", "_record", 4, 1, id="between a part and its position"),
        pytest.param("jsonl", "append", "_take_back", 1, 1, id="after the last part of a file"),
        pytest.param("postgres", "append", "copy_async", 3, None, id="while parts are published"),
        pytest.param("postgres", "replace", "copy_async", 3, None, id="while parts take the place of others"),
        pytest.param("postgres", "append", "run", 1, None, id="after the end"),
        pytest.param("query", "append", "copy_async", 3, None, id="while parts that begin again are published"),
    ],
)
async def test_goes_on_where_a_killed_process_was(
    settings: Settings, engine: Engine, numbers: asyncpg.Pool, tmp_path: Path, kind: str, mode: str, method: str,
    times: int, seen: int | None,
) -> None:  # fmt: skip
    lines = "".join(f'{{"id": {n}, "name": "n {n}", "more": "{n:0200}"}}\n' for n in range(1, ROWS + 1))
    (tmp_path / "rows.jsonl").write_text(lines)
    lake = tmp_path / "lake"
    ds.write_dataset(pa.table({"id": [0], "name": ["old"], "more": [""]}), lake, format="parquet")
    source = SOURCES[kind].replace("FOLDER", str(tmp_path))
    text = MOVE.format(source=source, folder=tmp_path, mode=mode, resumable="auto" if kind == "query" else "true")

    await killed(settings, text, die_in_transfer, method, times)
    if seen is not None:
        assert ds.dataset(lake).count_rows() == seen

    state = await engine.resume(await numbers.fetchval(EXECUTION))

    assert state.error is None
    ids = ds.dataset(lake).to_table()["id"]
    old = 1 if mode == "append" else 0
    assert (len(ids), pc.count_distinct(ids).as_py(), pc.max(ids).as_py()) == (ROWS + old, ROWS + old, ROWS)
    result = state.latest["move"].envelope["data"]
    assert result["rows"] == ROWS
    assert result["checksum"].startswith(f"{ROWS}:")
    if method == "_store":
        assert 0 < result["resumed"] < ROWS
    assert [path.name for path in lake.iterdir() if path.name[0] == "_"] == ["_SUCCESS"]


AGAIN = """
      spec: {policy: {rules: [
        {when: "{{ error is not defined and _attempt == 1 }}", then: {do: retry, attempts: 2, delay: 0}}]}}
"""


@pytest.mark.parametrize(
    ("kind", "rest", "times"), [("postgres", AGAIN, 2), ("query", "    loop: {in: [1, 2, 3], iterator: item}\n", 3)]
)
async def test_calls_and_iterations_append_each(
    engine: Engine, numbers: asyncpg.Pool, tmp_path: Path, kind: str, rest: str, times: int
) -> None:
    text = MOVE.format(source=SOURCES[kind], folder=tmp_path, mode="append", resumable="auto") + rest

    state = await engine.run(playbook(text))

    assert state.error is None
    assert ds.dataset(tmp_path / "lake").count_rows() == times * ROWS
