"""Transfers whose process is killed or comes late: the ledger in the target has each row there once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.transfer import staging
from noetl_dagster.tools.transfer.chunks import Transfer
from noetl_dagster.tools.transfer.tool import TransferTool
from tests.engine.recovery.killed import EXECUTION, die, killed
from tests.playbooks import playbook
from tests.serving import served
from tests.waiting import HERE, until

ROWS = 500
MOVE = """
workflow:
  - step: move
    tool:
      kind: transfer
      source: {path: FOLDER/rows.parquet}
      target: TARGET
      mode: MODE
      chunk_size: 100
      resumable: RESUMABLE
      verify: checksum
"""
TARGETS = {
    "postgres": "{kind: postgres, table: moved, auth: pg, key: id}",
    "duckdb": "{kind: duckdb, database: FOLDER/own.db, table: moved, key: id}",
}


def die_in_transfer(moment: str) -> None:
    from noetl_dagster.tools.transfer import duckdb, postgres_target, staging

    staging.COMMIT_SECONDS = 0.0
    seen: Counter[str] = Counter()
    kinds = (postgres_target.PostgresTable, duckdb.DuckdbTarget)
    for kind in kinds:
        publish, record = kind.publish, kind._record

        async def published(self: Any, publish: Any = publish) -> Any:
            if moment == "before it is published":
                die()
            outcome = await publish(self)
            if moment == "after it is published":
                die()
            return outcome

        async def recorded(self: Any, position: Any, *, record: Any = record, **named: Any) -> None:
            await record(self, position, **named)
            if position.rows:
                seen["chunks"] += 1
            # the fourth chunk is written, and its transaction is open
            if moment == "within a transaction" and (seen["chunks"] == 4 or position.outcome):
                die()

        kind.publish, kind._record = published, recorded  # type: ignore[method-assign]


class Place:
    """The target of a kind, and its rows."""

    def __init__(self, kind: str, pool: asyncpg.Pool, folder: Path) -> None:
        self.kind, self._pool, self._folder = kind, pool, folder

    def text(self, mode: str = "append", resumable: str = "auto") -> str:
        text = MOVE.replace("TARGET", TARGETS[self.kind]).replace("FOLDER", str(self._folder))
        return text.replace("MODE", mode).replace("RESUMABLE", resumable)

    async def run(self, query: str) -> list[tuple[Any, ...]]:
        if self.kind == "postgres":
            return [tuple(row) for row in await self._pool.fetch(query)]
        with duckdb.connect(str(self._folder / "own.db")) as connection:
            return connection.execute(query).fetchall()

    async def rows(self) -> tuple[Any, ...]:
        """The number of rows and of ids, and the sum of these."""
        [row] = await self.run("SELECT count(*)::int, count(DISTINCT id)::int, coalesce(sum(id), 0)::int FROM moved")
        return row

    async def staged(self) -> list[str]:
        """The names of what is staged, in any schema."""
        if self.kind == "postgres":
            query = "SELECT relname FROM pg_class WHERE relname LIKE 'noetl\\_transfer\\_%' AND relkind = 'r'"
        else:
            query = "SELECT table_name FROM duckdb_tables() WHERE table_name LIKE 'transfer%'"
        return [name for (name,) in await self.run(query)]


ALL = (ROWS, ROWS, ROWS * (ROWS + 1) // 2)


@pytest.fixture
def rows(tmp_path: Path) -> None:
    ids = range(1, ROWS + 1)
    pq.write_table(pa.table({"id": ids, "name": [f"n {n}" for n in ids]}), tmp_path / "rows.parquet")


@pytest.fixture(params=TARGETS)
async def place(request: pytest.FixtureRequest, pool: asyncpg.Pool, tmp_path: Path, rows: None) -> Place:
    made = Place(request.param, pool, tmp_path)
    await made.run("CREATE TABLE moved (id int, name text)")
    return made


def result_of(state: ExecutionState) -> Any:
    assert state.error is None
    return state.latest["move"].envelope["data"]


@pytest.mark.long
async def test_a_transfer_that_was_published_is_not_made_again(
    settings: Settings, engine: Engine, place: Place, pool: asyncpg.Pool
) -> None:
    """Also one that is not staged."""
    await killed(settings, place.text(), die_in_transfer, "after it is published")
    assert await place.rows() == ALL
    await place.run("DELETE FROM moved WHERE id = 1")  # as another would

    data = result_of(await engine.resume(await pool.fetchval(EXECUTION)))

    assert (data["rows"], data["checksum"].partition(":")[0]) == (ROWS, str(ROWS))
    assert await place.rows() == (ROWS - 1, ROWS - 1, ALL[2] - 1)
    assert await place.staged() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "moment"),
    [("append", "within a transaction"), ("replace", "before it is published")],
)
async def test_goes_on_at_the_last_chunk(
    settings: Settings, engine: Engine, place: Place, pool: asyncpg.Pool, tmp_path: Path, mode: str, moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await place.run("INSERT INTO moved VALUES (-5, 'old')")
    monkeypatch.setattr(staging, "COMMIT_SECONDS", 0.0)
    await killed(settings, place.text(mode, "true"), die_in_transfer, moment)
    assert await place.rows() == (1, 1, -5), "readers see no half of a transfer"
    assert await place.staged()

    data = result_of(await engine.resume(await pool.fetchval(EXECUTION)))

    old = 0 if mode == "replace" else 1
    assert await place.rows() == (ROWS + old, ROWS + old, ALL[2] - 5 * old)
    assert 0 < data["resumed"] <= ROWS
    assert data["resumed"] < ROWS or moment == "before it is published"
    assert data["checksum"].startswith(f"{ROWS}:")
    assert await place.staged() == []


async def test_what_fails_leaves_nothing_staged(engine: Engine, place: Place, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": "seven"}\n')
    state = await engine.run(playbook(place.text(resumable="true").replace(".parquet", ".jsonl")))
    assert state.error is not None
    assert await place.rows() == (0, 0, 0)
    assert await place.staged() == []


async def test_rows_of_a_missing_column_get_its_default(engine: Engine, place: Place) -> None:
    await place.run("ALTER TABLE moved ADD COLUMN seen int DEFAULT 5")
    for resumable in ("true", "false"):
        result_of(await engine.run(playbook(place.text("replace", resumable))))
        assert await place.run("SELECT DISTINCT seen FROM moved") == [(5,)]


async def test_many_at_once_are_each_there_once(engine: Engine, place: Place) -> None:
    """Each has its own entry in the ledger."""
    text = place.text().replace(
        "  - step: move\n", "  - step: move\n    loop: {in: [1, 2, 3, 4], iterator: one, spec: {mode: parallel}}\n"
    )
    state = await engine.run(playbook(text))
    assert state.error is None
    assert await place.rows() == (4 * ROWS, ROWS, 4 * ALL[2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ToolCall]:
    """The calls of transfers that are about to commit."""
    seen: list[ToolCall] = []
    refuse = staging.refuse_if_over

    async def noted(transfer: Transfer) -> None:
        seen.append(transfer.call)
        await refuse(transfer)

    monkeypatch.setattr(staging, "refuse_if_over", noted)
    return seen


@pytest.mark.parametrize(("mode", "resumable"), [("append", "true"), ("replace", "false")])
async def test_one_that_comes_late_writes_nothing(
    engine: Engine, place: Place, calls: list[ToolCall], mode: str, resumable: str
) -> None:
    """A process that was assumed dead begins to write when another one has ended the command and cleaned up."""
    data = result_of(await engine.run(playbook(place.text(mode, resumable))))
    await place.run("DELETE FROM moved WHERE id = 1")

    late = TransferTool().run(calls[0], engine.runtime.tool_context)

    if place.kind == "postgres":
        with pytest.raises(ToolError, match="another process has ended the command; this one comes too late"):
            await late
    else:  # whose ledger stays
        assert (await late).data == data
    assert await place.rows() == (ROWS - 1, ROWS - 1, ALL[2] - 1)


async def test_a_second_process_of_a_command_waits_for_the_first(
    engine: Engine, pool: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: None
) -> None:
    """Of DuckDB another process cannot open the file."""
    place = Place("postgres", pool, tmp_path)
    await pool.execute("CREATE TABLE moved (id int, name text)")
    calls: list[ToolCall] = []
    begun, go = asyncio.Event(), asyncio.Event()
    refuse = staging.refuse_if_over

    async def held(transfer: Transfer) -> None:
        calls.append(transfer.call)
        if len(calls) == 1:
            begun.set()
            await go.wait()
        await refuse(transfer)

    monkeypatch.setattr(staging, "refuse_if_over", held)
    first = asyncio.create_task(engine.run(playbook(place.text())))
    await begun.wait()
    second = asyncio.create_task(TransferTool().run(calls[0], engine.runtime.tool_context))
    waits = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND {HERE}"
    await until(lambda: pool.fetchval(waits), "the second to wait")
    go.set()
    assert (await second).data == result_of(await first)
    assert await place.rows() == ALL


async def test_the_chunks_of_an_http_target_have_keys(engine: Engine, tmp_path: Path, rows: None) -> None:
    """By which a receiver knows the chunks of a command that runs again."""
    seen: list[tuple[str, int]] = []

    async def take(request: Request) -> JSONResponse:
        seen.append((request.headers["idempotency-key"], len(await request.json())))
        return JSONResponse({})

    with served(Starlette(routes=[Route("/rows", take, methods=["POST"])])) as url:
        target = f"{{kind: http, url: '{url}/rows'}}"
        text = MOVE.replace("TARGET", target).replace("FOLDER", str(tmp_path)).replace("MODE", "append")
        text = text.replace("RESUMABLE", "auto").replace("checksum", "rows").replace("100\n", "200\n")
        result_of(await engine.run(playbook(text)))
    key = seen[0][0].removesuffix("-0")
    assert seen == [(f"{key}-0", 200), (f"{key}-1", 200), (f"{key}-2", 100)]
