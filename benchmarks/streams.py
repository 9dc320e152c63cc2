"""Results larger than memory: rows of postgres into the store, and from there through duckdb, at several sizes.

    python -m benchmarks.streams --rows 500000 2000000 10000000

Each size runs in a process of its own, which tells its peak of resident memory above that of an idle process (its
own account in ``/proc``, with the peak reset before), beside a chunk; and rows a second beside asyncpg's cursor
with the same bytes written to the same store in the same run. The last line extrapolates the peak to 100 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import orjson

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.playbook.models import Task, TaskSpec
from noetl_dagster.settings import Settings, dump_settings, get_settings, load_settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.registry import tool_for

SELECT = "SELECT n AS id, 'name ' || n AS name, n * 0.5::float8 AS price FROM generate_series(1, {rows}) AS n"
AGGREGATE = "SELECT count(*) AS n, sum(id) AS total, max(name) AS name FROM load"
MB = 1e6


def memory(name: str) -> int:
    """Bytes that the kernel counts for this process: ``VmRSS``, or ``VmHWM``, its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """The peak of resident memory above what there was, in bytes, and the seconds of a block."""

    def __enter__(self) -> Peak:
        gc.collect()
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
        plain = await bare(settings, results, rows)
        with Peak() as stored:
            ref = (await call(box, "postgres", SELECT.format(rows=rows))).ref
        with Peak() as read:
            found = (await call(box, "duckdb", AGGREGATE, load=ref)).data["rows"]
        assert ref is not None
        assert ref.rows == found[0]["n"] == rows
    await clients.close()
    await pool.close()
    return {
        "rows": rows, "bytes": ref.bytes_size, "stored": stored.bytes, "read": read.bytes,
        "store_seconds": stored.seconds, "read_seconds": read.seconds, "bare_seconds": plain,
    }  # fmt: skip


def report(settings: Settings, found: list[dict[str, float]]) -> None:
    chunk = settings.chunk_bytes
    for one in found:
        rate = one["rows"] / one["store_seconds"]
        print(
            f"{one['rows']:,} rows, {one['bytes'] / MB:.0f} MB: peak above idle {one['stored'] / MB:.1f} MB into the "
            f"store, {one['stored'] / chunk:.2f} chunks; {rate:,.0f} rows a second, "
            f"{one['store_seconds'] / one['bare_seconds']:.2f} of the time of a plain cursor; "
            f"through duckdb {one['read'] / MB:.1f} MB, {one['rows'] / one['read_seconds']:,.0f} rows a second"
        )
    first, last = found[0], found[-1]
    if last["bytes"] > first["bytes"]:
        for name, what in (("stored", "into the store"), ("read", "through duckdb")):
            slope = (last[name] - first[name]) / (last["bytes"] - first["bytes"])
            at = last[name] + slope * (100e9 - last["bytes"])
            print(f"{what}, 100 GB by the line through the ends: {at / MB:.0f} MB above idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 500_000, 1_000_000])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        settings = load_settings(sys.stdin.read())
        print(json.dumps(asyncio.run(measure(settings, int(arguments.one)))))
        return
    with database(embedded.ensure(get_settings())) as given:
        settings = given.model_copy(update={"default_postgres_credential": "embedded"})
        found = []
        for rows in arguments.rows:
            command = [sys.executable, "-m", "benchmarks.streams", "--one", str(rows)]
            done = subprocess.run(
                command, input=dump_settings(settings), stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(done.stdout))
        report(settings, found)


if __name__ == "__main__":
    main()
