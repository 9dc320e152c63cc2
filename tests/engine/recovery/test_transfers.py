"""Transfers whose process is killed: whoever runs their command again goes on where they were, each row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.engine.recovery.killed import EXECUTION, die, killed
from tests.serving import served

pytestmark = pytest.mark.long

ROWS = 6_000
LAST_STEP = 2
"""The copy in which a process dies: the smallest source has three."""
PAGE = 600
MOVE = """
workflow:
  - step: move
    tool:
      kind: transfer
      source: {source}
      target: {{kind: postgres, table: moved, auth: pg}}
      chunk_size: 500
      resumable: true
      verify: checksum
"""
SOURCES = {
    "postgres": "{kind: postgres, table: numbers, order_by: id, auth: pg}",
    "parquet": "{path: FOLDER/rows.parquet}",
    "csv": "{path: FOLDER/rows.csv}",
    "jsonl": "{path: FOLDER/rows.jsonl}",
    "http": "{kind: http, url: 'URL/rows', rows: data, paging: {next: next}}",
}
TWICE = """
workflow:
  - step: move
    tool:
      - {{name: count, kind: noop, set: {{step.n: "{{{{ step.n | default(0) + 1 }}}}"}}}}
      - name: move
        kind: transfer
        source: {source}
        target: {{kind: postgres, table: moved, auth: pg}}
        chunk_size: 500
        resumable: true
        spec: {{policy: {{rules: [{{when: "{{{{ step.n < 2 }}}}", then: {{do: jump, to: count}}}}]}}}}
"""
BETWEEN = "between two chunks"
SECOND = "within a chunk of the second call"
POSITION = "SELECT relname FROM pg_class WHERE relname LIKE 'noetl\\_transfer\\_%' AND relkind = 'r'"


def die_in_transfer(moment: str) -> None:
    from noetl_dagster.tools.rows import reader
    from noetl_dagster.tools.transfer import copying, files, postgres_source, staging, tool

    staging.COMMIT_SECONDS = 0.0
    reader.BLOCK_BYTES = files.BLOCK_BYTES = postgres_source.COPY_BLOCK = (
        12 << 10
    )  # small files have several blocks too
    step, encoded, write = copying.Copier.step, copying.Copier._encoded, tool.write_postgres
    seen: Counter[str] = Counter()

    async def stepped(self: Any, *arguments: Any) -> Any:
        seen["steps"] += 1
        if moment == BETWEEN and seen["steps"] == LAST_STEP:
            die()
        return await step(self, *arguments)

    async def encoding(self: Any, *arguments: Any) -> Any:
        data = await encoded(self, *arguments)
        if moment == (SECOND if seen["calls"] else "within a chunk") and seen["steps"] == LAST_STEP:
            die()
        return data

    async def written(*arguments: Any) -> Any:
        outcome = await write(*arguments)
        seen["calls"], seen["steps"] = 1, 0
        return outcome

    copying.Copier.step = stepped  # type: ignore[method-assign]
    copying.Copier._encoded = encoding  # type: ignore[method-assign]
    tool.write_postgres = written  # type: ignore[assignment]


@pytest.fixture
def asked() -> Counter[int]:
    """How often each page was asked for."""
    return Counter()


@pytest.fixture
def url(asked: Counter[int]) -> Iterator[str]:
    async def rows(request: Request) -> JSONResponse:
        page = int(request.query_params.get("page", "0"))
        asked[page] += 1
        data = [{"id": n, "name": f"n {n}"} for n in range(page * PAGE + 1, (page + 1) * PAGE + 1)]
        last = (page + 1) * PAGE >= ROWS
        return JSONResponse({"data": data, "next": None if last else f"/rows?page={page + 1}"})

    with served(Starlette(routes=[Route("/rows", rows)])) as address:
        yield address


@pytest.fixture
async def tables(pool: asyncpg.Pool) -> asyncpg.Pool:
    # asyncpg hands on what has arrived, up to 256 KiB at once
    made = f"SELECT n AS id, n || repeat('x', 150) AS name FROM generate_series(1, {ROWS}) AS n"
    await pool.execute(f"CREATE TABLE numbers AS {made}")
    await pool.execute("CREATE TABLE moved (id int PRIMARY KEY, name text)")
    return pool


def text_of(kind: str, folder: Path, url: str) -> str:
    connection = duckdb.connect(str(folder / "rows.db"))
    made = f"SELECT n::int AS id, 'n ' || n AS name FROM range(1, {ROWS + 1}) AS r(n)"
    connection.execute(f"CREATE TABLE rows AS {made}")
    if kind == "parquet":
        connection.execute(f"COPY rows TO '{folder}/rows.parquet' (ROW_GROUP_SIZE 2048)")
    if kind in ("csv", "jsonl"):
        options = "csv, header" if kind == "csv" else "json"
        connection.execute(f"COPY rows TO '{folder}/rows.{kind}' (FORMAT {options})")
    connection.close()
    source = SOURCES[kind].replace("FOLDER", str(folder)).replace("URL", url)
    return MOVE.format(source=source)


@pytest.mark.parametrize(
    ("kind", "moment"), [*((kind, "within a chunk") for kind in ("postgres", "parquet", "csv")), ("http", BETWEEN)]
)
async def test_goes_on_where_a_killed_process_was(
    settings: Settings, engine: Engine, tables: asyncpg.Pool, tmp_path: Path, url: str, kind: str, moment: str,
    asked: Counter[int],
) -> None:  # fmt: skip
    text = text_of(kind, tmp_path, url)
    await killed(settings, text, die_in_transfer, moment)
    assert await tables.fetchval("SELECT count(*) FROM moved") == 0
    [stage] = [row[0] for row in await tables.fetch(POSITION) if not row[0].endswith("_position")]
    staged = await tables.fetchval(f"SELECT count(*) FROM {stage}")
    assert 0 < staged < ROWS

    state = await engine.resume(await tables.fetchval(EXECUTION))

    assert state.error is None
    [row] = await tables.fetch("SELECT count(*), count(DISTINCT id), min(id), max(id) FROM moved")
    assert tuple(row) == (ROWS, ROWS, 1, ROWS)
    result = state.latest["move"].envelope["data"]
    assert result["resumed"] == staged
    assert result["rows"] == ROWS
    assert result["checksum"].startswith(f"{ROWS}:"), "of what both processes read"
    assert await tables.fetch(POSITION) == []
    if kind == "http":
        assert all(asked[page] == 1 for page in range(staged // PAGE))


async def test_each_of_two_calls_of_a_command_is_made_once(
    settings: Settings, engine: Engine, tables: asyncpg.Pool, tmp_path: Path
) -> None:
    """The first call, which is over, must not continue the copy that the second one has begun."""
    await tables.execute("ALTER TABLE moved DROP CONSTRAINT moved_pkey")
    text_of("jsonl", tmp_path, "")
    await killed(
        settings, TWICE.format(source=SOURCES["jsonl"].replace("FOLDER", str(tmp_path))), die_in_transfer, SECOND
    )
    assert await tables.fetchval("SELECT count(*) FROM moved") == ROWS

    state = await engine.resume(await tables.fetchval(EXECUTION))

    assert state.error is None
    assert await tables.fetchval("SELECT count(*) FROM moved") == 2 * ROWS
    assert 0 < state.latest["move"].envelope["data"]["resumed"] < ROWS
    assert await tables.fetch(POSITION) == []


async def test_a_source_that_is_another_by_now_is_read_from_its_beginning(
    settings: Settings, engine: Engine, tables: asyncpg.Pool, tmp_path: Path
) -> None:
    await killed(settings, text_of("jsonl", tmp_path, ""), die_in_transfer, "within a chunk")
    (tmp_path / "rows.jsonl").write_text('{"id": 7, "name": "other"}\n')

    await engine.resume(await tables.fetchval(EXECUTION))

    assert [tuple(row) for row in await tables.fetch("SELECT * FROM moved")] == [(7, "other")]


async def test_a_key_that_is_not_unique_loses_nothing(
    settings: Settings, engine: Engine, tables: asyncpg.Pool, tmp_path: Path
) -> None:
    await tables.execute("UPDATE numbers SET id = 1000000")  # as long as other ids, for as many chunks
    await tables.execute("ALTER TABLE moved DROP CONSTRAINT moved_pkey")
    await killed(settings, text_of("postgres", tmp_path, ""), die_in_transfer, "within a chunk")

    await engine.resume(await tables.fetchval(EXECUTION))

    assert await tables.fetchval("SELECT count(DISTINCT name) FROM moved") == ROWS
    assert await tables.fetchval("SELECT count(*) FROM moved") == ROWS
