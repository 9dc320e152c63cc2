"""Results larger than memory, and what a chunk costs on its way from step to step.

    python -m benchmarks.streams memory --rows 500000 2000000 10000000
    python -m benchmarks.streams arcs --chunks 300 --turns 3

``memory``: rows of postgres into the store, from there through duckdb, and rows of duckdb into the store, at several
sizes. Each size runs in a
process of its own, which tells its peak of resident memory above that of an idle process (its own account in
``/proc``, with the peak reset before), beside a chunk; and rows a second beside asyncpg's cursor with the same bytes
written to the same store in the same run. The last lines extrapolate the peaks to 100 GB, by least squares.

``arcs``: small chunks through python, python and a sink to postgres, joined by arcs ``on: call.partial``, from a
loop and from a generator, beside the same three steps as loops one after another. In turns in one engine; prints the
best: chunks a second, milliseconds, processor time of this process and of PostgreSQL, and events of a chunk.
``--profile`` says where the time of this process goes. Without a word both parts run.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import ctypes
import gc
import json
import pstats
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import psutil

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Task, TaskSpec
from noetl_dagster.settings import Settings, dump_settings, get_settings, load_settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.registry import tool_for

SELECT = "SELECT n AS id, 'name ' || n AS name, n * 0.5::float8 AS price FROM generate_series(1, {rows}) AS n"
MAKE = (
    "SELECT n AS id, 'name ' || n AS name, n * 0.5::DOUBLE AS price FROM generate_series(1, {rows}) AS t(n)"
)
AGGREGATE = "SELECT count(*) AS n, sum(id) AS total, max(name) AS name FROM load"
MB = 1e6

ROWS = 10
"""Rows of a small chunk."""

STEPS = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: arcs, path: bench/arcs}}
workload: {{chunks: 1}}
workflow:
  - step: read
    {reading}
    next: [{{step: convert{on}}}]
  - step: convert
    {converting}
    tool:
      kind: python
      input: {{rows: "{{{{ {rows} }}}}"}}
      code: "result = [{{'id': row['id'], 'cents': row['price'] * 100}} for row in rows]"
    next: [{{step: load{on}}}]
  - step: load
    {loading}
    tool: {{kind: python, input: {{rows: "{{{{ {rows} }}}}"}}, code: "result = rows"}}
    sink: {{tool: postgres, auth: bench, table: cents}}
"""
READ = f"[{{'id': page * {ROWS} + n, 'price': n}} for n in range({ROWS})]"
LOOP = f"""loop: {{in: "{{{{ range(chunks) }}}}", iterator: page}}
    tool: {{kind: python, input: {{page: "{{{{ page }}}}"}}, code: "result = {READ}"}}"""
GENERATOR = f"""tool:
      kind: python
      input: {{chunks: "{{{{ chunks }}}}"}}
      code: |
        def main(chunks):
            for page in range(chunks):
                yield {READ}"""


def over(step: str) -> str:
    return f"""loop: {{in: "{{{{ {step}.results }}}}", iterator: page}}"""


TAKE = "loop: {iterator: page}"
STREAM = {"on": ", on: call.partial", "converting": TAKE, "loading": TAKE, "rows": "page.rows"}
ARCS = {
    "no stream": STEPS.format(
        reading=LOOP, on="", converting=over("read"), loading=over("convert"), rows="page"
    ),
    "loop": STEPS.format(reading=LOOP, **STREAM),
    "generator": STEPS.format(reading=GENERATOR, **STREAM),
}


def memory(name: str) -> int:
    """Bytes that the kernel counts for this process: ``VmRSS``, or ``VmHWM``, its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """The peak of resident memory above what there was, in bytes, and the seconds of a block."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed is no part of what there is
        self._idle, self._start = memory("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.bytes = memory("VmHWM") - self._idle


async def call(box: Toolbox, kind: str, command: str, **given: Any) -> ToolResult:
    task = Task(name="bench", kind=kind, config={}, spec=TaskSpec(options={}))
    return await tool_for(kind).run(
        ToolCall(7001, kind, task, {"command": command}, given, auth="bench"), box
    )


async def bare(settings: Settings, results: ResultStore, rows: int) -> float:
    """Seconds of a plain cursor whose rows are written as JSON in chunks of the same size."""
    assert settings.db_url is not None
    connection = await asyncpg.connect(settings.db_url)
    start, held = time.perf_counter(), bytearray()
    async with connection.transaction():
        cursor = await connection.cursor(SELECT.format(rows=rows))
        while records := await cursor.fetch(4096):
            held += orjson.dumps([dict(record.items()) for record in records])
            if len(held) >= settings.chunk_bytes:
                await results.put(bytes(held), execution_id=7001, step="bare", name="rows")
                held.clear()
    await results.put(bytes(held), execution_id=7001, step="bare", name="rows")
    await connection.close()
    return time.perf_counter() - start


async def measure(settings: Settings, rows: int) -> dict[str, float]:
    """What one size takes, in this process."""
    assert settings.db_url is not None
    await apply_schema(settings.db_url)
    pool = await open_pool(settings.db_url, size=4)
    clients = Clients(settings)
    async with ResultStore(settings, pool) as results:
        box = Toolbox(settings, results, Credentials(settings, pool), clients, lambda: None)  # type: ignore[arg-type, return-value]
        few = (
            await call(box, "postgres", SELECT.format(rows=200_000))
        ).ref  # imports, connects, starts threads
        await call(box, "duckdb", AGGREGATE, load=few)
        await call(box, "duckdb", MAKE.format(rows=200_000))
        with Peak() as stored:
            ref = (await call(box, "postgres", SELECT.format(rows=rows))).ref
        with Peak() as read:
            found = (await call(box, "duckdb", AGGREGATE, load=ref)).data["rows"]
        with Peak() as made:
            own = (await call(box, "duckdb", MAKE.format(rows=rows))).ref
        plain = await bare(settings, results, rows)
        assert ref is not None
        assert own is not None
        assert ref.rows == own.rows == found[0]["n"] == rows
    await clients.close()
    await pool.close()
    return {
        "rows": rows, "bytes": ref.bytes_size, "stored": stored.bytes, "read": read.bytes, "made": made.bytes,
        "store_seconds": stored.seconds, "read_seconds": read.seconds, "make_seconds": made.seconds,
        "bare_seconds": plain,
    }  # fmt: skip


def report(settings: Settings, found: list[dict[str, float]]) -> None:
    chunk = settings.chunk_bytes
    for one in found:
        rate = one["rows"] / one["store_seconds"]
        print(
            f"{one['rows']:,} rows, {one['bytes'] / MB:.0f} MB: peak above idle {one['stored'] / MB:.1f} MB into the "
            f"store, {one['stored'] / chunk:.2f} chunks; {rate:,.0f} rows a second, "
            f"{one['store_seconds'] / one['bare_seconds']:.2f} of the time of a plain cursor; "
            f"through duckdb {one['read'] / MB:.1f} MB, {one['rows'] / one['read_seconds']:,.0f} rows a second; "
            f"from duckdb {one['made'] / MB:.1f} MB, {one['rows'] / one['make_seconds']:,.0f} rows a second"
        )
    if len({one["bytes"] for one in found}) > 1:
        for name, what in (("stored", "into the store"), ("read", "through duckdb"), ("made", "from duckdb")):
            line = statistics.linear_regression([one["bytes"] for one in found], [one[name] for one in found])
            at = line.intercept + line.slope * 100e9
            print(
                f"{what}, 100 GB by least squares: {at / MB:.0f} MB above idle, "
                f"{line.slope * chunk / 1000:.1f} KB a chunk"
            )


@dataclass(frozen=True)
class Chain:
    """What a chunk took on its way through three steps: milliseconds, also of processors, and events."""

    clock: float
    own: float
    postgres: float
    events: float

    def __str__(self) -> str:
        return (
            f"{1000 / self.clock:.0f} chunks a second, {self.clock:.1f} ms a chunk; processor {self.own:.1f} ms "
            f"here, {self.postgres:.1f} ms in postgres; {self.events:.1f} events"
        )


def postgres_seconds(connection_pid: int) -> float:
    """Processor seconds of PostgreSQL's processes, those of sessions that have ended left out."""
    server = psutil.Process(connection_pid).parent()
    assert server is not None
    return sum(sum(one.cpu_times()[:2]) for one in server.children())


async def chain(engine: Engine, text: str, chunks: int) -> Chain:
    """One execution of the three steps, whose rows are in the table once each."""
    pool = engine.runtime.pool
    await pool.execute("TRUNCATE cents")
    server = await pool.fetchval("SELECT pg_backend_pid()")
    playbook = parse_playbook(text)
    postgres, start, own = postgres_seconds(server), time.perf_counter(), time.process_time()
    state = await engine.run(playbook, {"chunks": chunks})
    clock, own = time.perf_counter() - start, time.process_time() - own
    postgres = postgres_seconds(server) - postgres
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert await pool.fetchval("SELECT count(DISTINCT id) = count(*) FROM cents")
    assert await pool.fetchval("SELECT count(*) FROM cents") == chunks * ROWS
    events = await pool.fetchval(
        "SELECT count(*) FROM noetl.event WHERE execution_id = $1", state.execution_id
    )
    each = 1000 / chunks
    return Chain(clock * each, own * each, postgres * each, events / chunks)


async def arcs(settings: Settings, chunks: int, turns: int, profiled: bool) -> None:
    engine = await Engine.open(settings)
    try:
        await engine.runtime.pool.execute("CREATE TABLE cents (id bigint, cents bigint)")
        found: dict[str, Chain] = {}
        for turn in range(turns + 1):  # the first compiles, connects, starts threads
            for name, text in ARCS.items():
                one = await chain(engine, text, chunks if turn else 10)
                if turn:
                    found[name] = min(found.get(name, one), one, key=lambda each: each.clock)
        for name, one in found.items():
            print(f"arcs, {name}: {one}; {one.clock / found['no stream'].clock:.2f} of no stream")
        if profiled:
            for name, text in ARCS.items():
                print(name)
                with cProfile.Profile() as profile:
                    await chain(engine, text, chunks)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["memory", "arcs"])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 500_000, 1_000_000])
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        settings = load_settings(sys.stdin.read())
        print(json.dumps(asyncio.run(measure(settings, int(arguments.one)))))
        return
    with database(embedded.ensure(get_settings())) as given:
        settings = given.model_copy(update={"default_postgres_credential": "embedded"})
        if arguments.part != "memory":
            asyncio.run(arcs(settings, arguments.chunks, arguments.turns, arguments.profile))
        if arguments.part != "arcs":
            report(settings, [one_size(settings, rows) for rows in arguments.rows])


def one_size(settings: Settings, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.streams", "--one", str(rows)]
    done = subprocess.run(
        command, input=dump_settings(settings), stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
