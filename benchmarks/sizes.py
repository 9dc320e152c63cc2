"""What an item of a fan-out leaves behind: bytes of PostgreSQL and of the object store, and how fast it is projected.

    python -m benchmarks.sizes --items 5000

Each kind of result is a fan-out of its own, in a database of its own of the embedded PostgreSQL: trivial numbers,
2 KB inside the event, and 20 KB in the object store. Rows and indexes are counted by table, after a vacuum. One
process drives and runs the items; a pool of workers writes the same events.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from noetl_dagster import embedded
from noetl_dagster.embedded.isolation import isolated
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: bench, path: bench/sizes}}
workload: {{items: 10}}
workflow:
  - step: start
    tool: {{kind: python, input: {{n: "{{{{ items }}}}"}}, code: "result = list(range(n))"}}
    next: [fan]
  - step: fan
    loop: {{in: "{{{{ start.data }}}}", iterator: n}}
    spec: {{loop_mode: fanout}}
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "{code}"}}
"""
NOISE = "import random; random.seed(n); result = {'n': n, 'text': random.randbytes(%d).hex()}"
RESULTS = {
    "a number": "result = n * 2",
    "2 KB in the event": NOISE % 1000,
    "20 KB in the store": NOISE % 10_000,
}

BYTES = """
SELECT sum(pg_table_size(relid))::bigint AS tables, sum(pg_indexes_size(relid))::bigint AS indexes
FROM pg_stat_user_tables WHERE schemaname = 'noetl' AND (relname = $1 OR relname LIKE $1 || '\\_%')
"""


@dataclass(frozen=True)
class Measured:
    """Of one fan-out; bytes are those that an item adds."""

    result: str
    events: float
    event_table: float
    event_indexes: float
    references: float
    objects: float
    wal: float
    dumped: float
    items_a_second: float
    projected_a_second: float


async def measure(settings: Settings, result: str, items: int, folder: Path) -> Measured:
    """Runs a fan-out, then projects it from nothing."""
    assert settings.db_url is not None
    playbook = parse_playbook(PLAYBOOK.format(code=RESULTS[result]), file="sizes.yaml")
    engine = await Engine.open(settings)
    await engine.runtime.results.ready(StoreTier.MINIO)
    await engine.run(playbook, {"items": 50})  # tables and partitions are made
    pool = await open_pool(settings.db_url, size=2)
    before, objects = await _sizes(pool), _objects(settings)
    wal = await pool.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
    begun = time.perf_counter()
    state = await engine.run(playbook, {"items": items})
    seconds = time.perf_counter() - begun
    assert state.status is ExecutionStatus.COMPLETED, state.error
    await engine.close()
    wal = await pool.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn") - wal
    after = await _sizes(pool)
    begun = time.perf_counter()
    events = await Projection(pool).rebuild()
    projected = events / (time.perf_counter() - begun)
    await pool.close()
    added = {name: (after[name] - before[name]) / items for name in after}
    return Measured(
        result=result,
        events=added["events"],
        event_table=added["event tables"],
        event_indexes=added["event indexes"],
        references=added["result_ref tables"] + added["result_ref indexes"],
        objects=(_objects(settings) - objects) / items,
        wal=float(wal) / items,
        dumped=_dump_size(settings.db_url, folder) / items,
        items_a_second=items / seconds,
        projected_a_second=projected,
    )


async def _sizes(pool: asyncpg.Pool) -> dict[str, float]:
    await pool.execute("VACUUM ANALYZE")
    found: dict[str, float] = {"events": await pool.fetchval("SELECT count(*) FROM noetl.event")}
    for table in ("event", "result_ref"):
        row = await pool.fetchrow(BYTES, table)
        found |= {f"{table} tables": row["tables"], f"{table} indexes": row["indexes"]}
    return found


def _objects(settings: Settings) -> int:
    return sum(locations.file_sizes(settings, f"s3://{settings.minio_bucket}/").values())


def _dump_size(url: str, folder: Path) -> int:
    """Bytes of the event log's dump, compressed as pg_dump does by itself."""
    from noetl_dagster.embedded.postgres import _programs

    program = shutil.which("pg_dump", path=_programs())
    if program is None:
        return 0
    file = folder / "log.dump"
    subprocess.run([program, "--format=custom", f"--file={file}", url], check=True)
    return file.stat().st_size


def show(measured: list[Measured]) -> None:
    for one in measured:
        print(
            f"{one.result:20s} {one.items_a_second:6,.0f} items a second, {one.events:.1f} events an item; an event: "
            f"table {one.event_table / one.events:5.0f}, indexes {one.event_indexes / one.events:5.0f} bytes; an item: "
            f"log {one.event_table + one.event_indexes:6,.0f}, references {one.references:5,.0f}, "
            f"objects {one.objects:7,.0f}, WAL {one.wal:6,.0f}, dump {one.dumped:6,.0f} bytes; "
            f"projected {one.projected_a_second:7,.0f} events a second"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5000)
    items = parser.parse_args().items
    services = embedded.ensure(Settings())
    measured = []
    for result in RESULTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with isolated(services, folder) as settings:
                measured.append(asyncio.run(measure(settings, result, items, folder)))
        show(measured[-1:])


if __name__ == "__main__":
    main()
