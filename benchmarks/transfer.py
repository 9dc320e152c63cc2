"""The transfer tool beside raw COPY of the same rows, and the memory that it takes.

Each path is held against what asyncpg does with ready-made bytes: COPY out | COPY in between tables, COPY out alone
where the rows leave PostgreSQL, COPY in where they come from elsewhere. Both sides run in turn in one process. Run:
``python benchmarks/transfer.py [--rows 200000] [--rounds 3] [--only name]``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import duckdb
import orjson
from storage import peak_memory

from benchmarks._no_log import NoLog
from noetl_dagster import embedded
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.playbook.models import Task
from noetl_dagster.settings import Settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.transfer.tool import TransferTool

GOAL = 0.5
ROWS_A_PAGE = 20_000
MAKE = """
CREATE TABLE bench_source AS
SELECT n AS id, 'patient ' || n || ', ward "' || n % 7 || '"' AS name, n * 1.25::float8 AS weight,
       n % 3 = 0 AS active, timestamptz '2026-01-01 00:00+00' + n * interval '1 second' AS at
FROM generate_series(1, {rows}) AS n;
CREATE TABLE bench_target (LIKE bench_source);
ALTER TABLE bench_source ADD PRIMARY KEY (id);
ANALYZE bench_source;
"""
Action = Callable[[], Awaitable[object]]


class Contest:
    """The tool and raw COPY move the same rows."""

    def __init__(self, context: ToolContext, log: NoLog, pool: asyncpg.Pool, folder: Path, rows: int) -> None:
        self.tool_context, self.pool, self.folder, self.rows = context, pool, folder, rows
        self.text = b""
        self.left = log.removals
        self._numbers = itertools.count(1)

    async def transfer(self, source: dict[str, Any], target: dict[str, Any], **more: Any) -> None:
        config = {"source": source, "target": target, **more}
        call = ToolCall(
            execution_id=1,
            step="bench",
            task=Task(name="bench", kind="transfer", config=config),
            config=config,
            input={},
            folder=str(self.folder),
            command_id=f"1:bench:{next(self._numbers)}:1",
        )
        result = await TransferTool().run(call, self.tool_context)
        assert result.data["rows"] == self.rows, result.data
        while self.left:
            await self.left.pop()()

    async def copy_out(self) -> None:
        async def forget(data: bytes) -> None: ...

        async with self.pool.acquire() as connection:
            await connection.copy_from_table("bench_source", output=forget)

    async def copy_in(self) -> None:
        async def blocks() -> AsyncIterator[bytes]:
            for start in range(0, len(self.text), 1 << 19):
                yield self.text[start : start + (1 << 19)]

        async with self.pool.acquire() as connection:
            await connection.copy_to_table("bench_target", source=blocks())

    async def copy_through(self) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue(8)

        async def blocks() -> AsyncIterator[bytes]:
            while data := await queue.get():
                yield data

        async with self.pool.acquire() as source, self.pool.acquire() as target:
            writing = asyncio.ensure_future(target.copy_to_table("bench_target", source=blocks()))
            await source.copy_from_table("bench_source", output=queue.put)
            await queue.put(b"")
            await writing

    async def line(self, what: str, ours: Action, plain: Action, rounds: int) -> str:
        """One line of the table: ours as a share of the plain way, both in turn."""
        times: tuple[list[float], list[float]] = ([], [])
        peaks = []
        for _ in range(rounds):
            for action, spent in zip((plain, ours), times, strict=True):
                await self.pool.execute("TRUNCATE bench_target")
                await self.pool.execute("CHECKPOINT")
                with peak_memory() as peak:
                    begin = time.perf_counter()
                    await action()
                    spent.append(time.perf_counter() - begin)
                    if action is ours:
                        peaks.append(peak())
        least = [min(spent) for spent in times]
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        verdict = "ok  " if ratio >= GOAL else "MISS"
        return (
            f"{what:<42}  {verdict}  {ratio:.2f} of raw COPY ({self.rows / least[1]:>9,.0f} rows/s, "
            f"raw {self.rows / least[0]:>9,.0f})   (goal >= {GOAL})   peak {max(peaks):.0f} MB"
        )


@contextmanager
def pages_served(lines: list[bytes]) -> Iterator[str]:
    """Serves ``{"data": [...], "next": page}`` by ``?page=``, from a thread."""
    bodies = [
        b'{"data": [%b], "next": %b}'
        % (
            b",".join(lines[start : start + ROWS_A_PAGE]),
            b"null" if start + ROWS_A_PAGE >= len(lines) else b"%d" % (start // ROWS_A_PAGE + 2),
        )
        for start in range(0, len(lines), ROWS_A_PAGE)
    ]

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = int(parse_qs(urlsplit(self.path).query).get("page", ["1"])[0])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(bodies[page - 1])))
            self.end_headers()
            self.wfile.write(bodies[page - 1])

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/rows"
    server.shutdown()


async def prepare(contest: Contest) -> list[bytes]:
    """The rows as every kind of source; gives them as JSON lines."""
    blocks: list[bytes] = []

    async def keep(data: bytes) -> None:
        blocks.append(data)

    await contest.pool.execute("DROP TABLE IF EXISTS bench_source, bench_target")
    await contest.pool.execute(MAKE.format(rows=contest.rows))
    async with contest.pool.acquire() as connection:
        await connection.copy_from_table("bench_source", output=keep)
        contest.text = b"".join(blocks)
        blocks.clear()
        await connection.copy_from_table("bench_source", output=keep, format="csv", header=True)
    (contest.folder / "rows.csv").write_bytes(b"".join(blocks))
    connection = duckdb.connect(str(contest.folder / "rows.db"))
    connection.execute(
        "CREATE TABLE rows AS FROM read_csv(?, quote = '\"', escape = '\"')",
        [str(contest.folder / "rows.csv")],
    )
    connection.execute(f"COPY rows TO '{contest.folder}/rows.jsonl' (FORMAT json)")
    connection.close()
    lines = (contest.folder / "rows.jsonl").read_bytes().splitlines()
    assert len(lines) == contest.rows
    assert orjson.loads(lines[0])["id"] == 1
    return lines


async def measure(contest: Contest, bucket: str, rounds: int, only: str) -> None:
    lines = await prepare(contest)
    table = {"kind": "postgres", "table": "bench_source"}
    target = {"kind": "postgres", "table": "bench_target"}
    away = {"path": f"s3://{bucket}/bench/rows.parquet"}
    with pages_served(lines) as url:
        lines.clear()
        paged = {"kind": "http", "url": url, "rows": "data", "paging": {"next": "next", "param": "page"}}
        paths: dict[str, tuple[Action, Action]] = {
            "postgres -> postgres": (lambda: contest.transfer(table, target), contest.copy_through),
            "postgres -> postgres, resumable": (
                lambda: contest.transfer({**table, "order_by": "id"}, target, resumable=True),
                contest.copy_through,
            ),
            "csv -> postgres, resumable": (
                lambda: contest.transfer({"path": "rows.csv"}, target, resumable=True),
                contest.copy_in,
            ),
            "postgres -> parquet in the object store": (
                lambda: contest.transfer(table, away),
                contest.copy_out,
            ),
            "parquet in the object store -> postgres": (
                lambda: contest.transfer(away, target),
                contest.copy_in,
            ),
            "duckdb -> postgres": (
                lambda: contest.transfer({"kind": "duckdb", "database": "rows.db", "table": "rows"}, target),
                contest.copy_in,
            ),
            "csv -> postgres": (lambda: contest.transfer({"path": "rows.csv"}, target), contest.copy_in),
            "jsonl -> postgres": (lambda: contest.transfer({"path": "rows.jsonl"}, target), contest.copy_in),
            "http -> postgres": (lambda: contest.transfer(paged, target), contest.copy_in),
        }
        for name, (ours, plain) in paths.items():
            if only in name:
                print(await contest.line(name, ours, plain, rounds), flush=True)
    await contest.pool.execute("DROP TABLE bench_source, bench_target")


async def run(settings: Settings, folder: Path, rows: int, rounds: int, only: str) -> None:
    assert settings.db_url is not None
    await apply_schema(settings.db_url)
    pool = await open_pool(settings.db_url, size=4)
    clients = Clients(settings)

    def no_spark() -> Any:
        raise AssertionError("a transfer needs no Spark")

    try:
        async with ResultStore(settings, pool) as results:
            log = NoLog()
            context = log.toolbox(settings, results, Credentials(settings, pool), clients, no_spark)
            await measure(Contest(context, log, pool, folder, rows), settings.minio_bucket, rounds, only)
    finally:
        await clients.close()
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3, help="times each side is measured")
    parser.add_argument("--only", default="", help="a part of the names of the paths to measure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as home:
        settings = embedded.ensure(
            Settings(home=Path(home), default_postgres_credential="embedded", http_body_bytes=1 << 30)
        )
        try:
            asyncio.run(run(settings, Path(home), given.rows, given.rounds, given.only))
        finally:
            embedded.down(settings)


if __name__ == "__main__":
    main()
