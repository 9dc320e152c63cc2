"""Results larger than memory: peak memory of what moves them, at several sizes.

    python -m benchmarks.large_results --rows 1000000 3000000 10000000

Rows of postgres into the store, from there through duckdb, rows of duckdb into the store, and rows of postgres chunk
by chunk through a python step into a table. Each size runs in a process of its own, which tells its peak of resident
memory above that of an idle process (its own account in ``/proc``, with the peak reset before), beside a chunk; and
rows a second, beside asyncpg's cursor with the same bytes written to the same store in the same run. Through steps it
also tells by how much resident memory grows with each chunk in the second half of the run. The last lines extrapolate
the peaks to 100 GB, by least squares.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import orjson

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Task, TaskSpec
from noetl_dagster.settings import Settings, dump_settings, get_settings, load_settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.registry import tool_for

SELECT = "SELECT n AS id, 'name ' || n AS name, n * 0.5::float8 AS price FROM generate_series(1, {rows}) AS n"
MAKE = "SELECT n AS id, 'name ' || n AS name, n * 0.5::DOUBLE AS price FROM generate_series(1, {rows}) AS t(n)"
AGGREGATE = "SELECT count(*) AS n, sum(id) AS total, max(name) AS name FROM load"
THROUGH = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: through, path: bench/through}
workload: {rows: 1}
workflow:
  - step: read
    tool: {kind: postgres, auth: bench, command: "COMMAND"}
    next: [{step: load, on: call.partial}]
  - step: load
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = rows"}
    sink: {tool: postgres, auth: bench, table: through}
""".replace("COMMAND", SELECT.format(rows="{{ rows }}"))
MB = 1e6
FEW = 200_000
"""Rows of the first turn, in which everything is imported and connected and threads start."""


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


async def growth(work: asyncio.Task[Any], chunks: float) -> float:
    """Bytes by which resident memory grows with each chunk in the second half of some work."""
    samples: list[int] = []
    while not work.done():
        samples.append(memory("VmRSS"))
        await asyncio.wait([work], timeout=0.1)
    half = samples[len(samples) // 2 :]
    return statistics.linear_regression(range(len(half)), half).slope * len(samples) / chunks


async def call(context: ToolContext, kind: str, command: str, **given: Any) -> ToolResult:
    task = Task(name="bench", kind=kind, config={}, spec=TaskSpec(options={}))
    return await tool_for(kind).run(ToolCall(7001, kind, task, {"command": command}, given, auth="bench"), context)


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


async def measure(settings: Settings, rows: int) -> dict[str, Any]:
    """What one size takes, in this process: of each way its peak in bytes and its seconds."""
    engine = await Engine.open(settings)
    context, results = engine.runtime.tool_context, engine.runtime.results
    found: dict[str, Peak] = {}
    try:
        await engine.runtime.pool.execute("CREATE TABLE IF NOT EXISTS through (id bigint, name text, price float8)")
        for count in (FEW, rows):
            with Peak() as found["into the store"]:
                ref = (await call(context, "postgres", SELECT.format(rows=count))).ref
            with Peak() as found["through duckdb"]:
                read = (await call(context, "duckdb", AGGREGATE, load=ref)).data["rows"]
            with Peak() as found["out of duckdb"]:
                made = (await call(context, "duckdb", MAKE.format(rows=count))).ref
            await engine.runtime.pool.execute("TRUNCATE through")
            assert ref is not None
            with Peak() as found["through steps"]:
                work = asyncio.create_task(engine.run(parse_playbook(THROUGH), {"rows": count}))
                grown = await growth(work, (ref.bytes_size or 0) / settings.chunk_bytes)
                state = await work
            assert state.status is ExecutionStatus.COMPLETED, state.error
            loaded = await engine.runtime.pool.fetchval("SELECT count(DISTINCT id) FROM through")
            assert made is not None
            assert ref.rows == made.rows == read[0]["n"] == loaded == count
        plain = await bare(settings, results, rows)
    finally:
        await engine.close()
    ways = {name: (one.bytes, one.seconds) for name, one in found.items()}
    assert ref is not None  # of the second turn
    return {"rows": rows, "bytes": ref.bytes_size, "plain": plain, "ways": ways, "grown": grown}


def report(settings: Settings, one: dict[str, Any]) -> None:
    chunk = settings.chunk_bytes
    print(f"{one['rows']:,} rows, {one['bytes'] / MB:.0f} MB")
    for name, (peak, seconds) in one["ways"].items():
        print(
            f"  {name}: {peak / MB:.1f} MB above idle, {peak / chunk:.2f} chunks; "
            f"{one['rows'] / seconds:,.0f} rows a second, {seconds / one['plain']:.2f} of the time of a cursor",
            flush=True,
        )
    print(f"  through steps: resident memory grows by {one['grown'] / 1000:.1f} KB a chunk in the second half")


def extrapolate(settings: Settings, found: list[dict[str, Any]]) -> None:
    """The line through the peaks of several sizes, by least squares."""
    sizes = [one["bytes"] for one in found]
    for name in found[0]["ways"]:
        line = statistics.linear_regression(sizes, [one["ways"][name][0] for one in found])
        at, each = line.intercept + line.slope * 100e9, line.slope * settings.chunk_bytes
        print(f"{name}, 100 GB: {at / MB:.0f} MB above idle, {each / 1000:.1f} KB a chunk")


def one_size(settings: Settings, rows: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large_results", "--one", str(rows)]
    done = subprocess.run(command, input=dump_settings(settings), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[300_000, 1_000_000, 2_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asyncio.run(measure(load_settings(sys.stdin.read()), arguments.one))))
        return
    with database(embedded.ensure(get_settings())) as given:
        settings = given.model_copy(update={"default_postgres_credential": "embedded"})
        found = []
        for rows in arguments.rows:
            found.append(one_size(settings, rows))
            report(settings, found[-1])
        if len(found) > 1:
            extrapolate(settings, found)


if __name__ == "__main__":
    main()
