"""Fan-out against what it is built on: plain Dagster dynamic outputs, and the log's raw insert limit.

    python -m benchmarks.fanout --items 1000 10000 100000 --processes 1 2 --spark 1000000

All in one run, on the embedded services: trivial python items with the full trail of events. Prints items a
second, the peak of this process's memory above what it held before, and ratios. The smallest size is measured
twice: in a process that has run nothing (it opens connections, starts threads and fills caches meanwhile), and
then again in the same process, as every other size is. From the smallest and the largest of these come what a
fan-out costs before its first item and after its last, and what each item costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.fanout_dagster import in_process_rate, multiprocess_rate
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.log import as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command, CommandEvents, Outcome

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: bench, path: bench/fanout}}
workload: {{items: 10}}
workflow:
  - step: start
    tool: {{kind: python, input: {{n: "{{{{ items }}}}"}}, code: "result = list(range(n))"}}
    next: [fan]
  - step: fan
    loop: {{in: "{{{{ start.data }}}}", iterator: n}}
    spec: {{loop_mode: fanout, fanout: {{{fanout}}}}}
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "{code}"}}
"""
TRIVIAL = "result = n * 2"
EVENTS_AN_ITEM = 4
BATCH = 500


@dataclass(frozen=True)
class Measured:
    items: int
    seconds: float
    megabytes: float

    @property
    def rate(self) -> float:
        return self.items / self.seconds


@contextmanager
def database(settings: Settings) -> Iterator[Settings]:
    """A database that is dropped at the end."""
    assert settings.db_url is not None
    server, _, _ = settings.db_url.rpartition("/")
    name = f"bench-{uuid.uuid4().hex[:8]}"
    _administer(f"{server}/postgres", f'CREATE DATABASE "{name}"')
    try:
        url = f"{server}/{name}"
        yield settings.model_copy(update={"db_url": url, "minio_bucket": name})
    finally:
        _administer(f"{server}/postgres", f'DROP DATABASE "{name}" WITH (FORCE)')


def _administer(url: str, statement: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run())


class Memory:
    """Peak resident memory of this process while the block runs, above that at its start."""

    def __enter__(self) -> Memory:
        self._start = self._now()
        self._peak = self._start
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def megabytes(self) -> float:
        return (self._peak - self._start) / 1024**2

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._peak = max(self._peak, self._now())

    @staticmethod
    def _now() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()


async def ours(settings: Settings, sizes: list[int], fanout: str) -> list[Measured]:
    """Fan-outs of so many items, from the first event to the last, one after another in one new engine."""
    engine = await Engine.open(settings)
    try:
        playbook = parse_playbook(PLAYBOOK.format(fanout=fanout, code=TRIVIAL))
        return [await _ours(engine, playbook, items) for items in sizes]
    finally:
        await engine.close()


async def _ours(engine: Engine, playbook: Playbook, items: int) -> Measured:
    with Memory() as memory:
        started = time.perf_counter()
        state = await engine.run(playbook, {"items": items})
        seconds = time.perf_counter() - started
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["fan"].envelope["failed"] == 0
    return Measured(items, seconds, memory.megabytes)


async def raw_log(settings: Settings, items: int) -> Measured:
    """The same events inserted by COPY in batches of 500, and nothing else."""
    engine = await Engine.open(settings)
    try:
        make, pool, execution_id = CommandEvents(engine.runtime.ids), engine.runtime.pool, 1
        rows = [as_row(event) for index in range(items) for event in _events(make, execution_id, index)]
        started = time.perf_counter()
        async with pool.acquire() as connection:
            for start in range(0, len(rows), BATCH):
                await connection.copy_records_to_table(
                    "event", schema_name="noetl", columns=COLUMNS, records=rows[start : start + BATCH]
                )
        return Measured(items, time.perf_counter() - started, 0.0)
    finally:
        await engine.close()


def _events(make: CommandEvents, execution_id: int, index: int) -> list[Event]:
    command = Command(execution_id, "fan", index=index, item=index, length=1, loop_id="1", shard=True)
    outcome = Outcome({"status": "ok", "data": index}, tasks=[{"name": "t", "runs": 1, "ms": 1.0}])
    return [
        make.item(command),
        make.issued(command, "python"),
        make.claimed(command),
        make.ended(command, outcome),
    ]


def show(name: str, measured: Measured, raw: Measured) -> None:
    print(
        f"{name:>32}: {measured.items:>9,} items {measured.seconds:8.2f} s {measured.rate:9,.0f} items/s "
        f"{measured.rate / raw.rate:5.2f} of the log's raw limit, +{measured.megabytes:.0f} MB",
        flush=True,
    )


def show_costs(cold: Measured, warm: list[Measured]) -> None:
    """What a fan-out costs whatever its size, and what an item costs."""
    first, last = warm[0], warm[-1]
    print(f"{'':>32}  a new process costs {cold.seconds - first.seconds:.2f} s more")
    if last.items > first.items:
        item = (last.seconds - first.seconds) / (last.items - first.items)
        fixed = first.seconds - item * first.items
        print(f"{'':>32}  {fixed:.2f} s whatever the size, and then {1 / item:,.0f} items/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="that work on a fan-out")
    parser.add_argument("--spark", type=int, default=0, help="items of a fan-out on the spark engine")
    parser.add_argument("--dagster-items", type=int, default=200)
    parser.add_argument("--multiprocess-items", type=int, default=8)
    arguments = parser.parse_args()
    settings = embedded.ensure(Settings())
    print(f"{os.cpu_count()} cores")
    best: Any = None
    with database(settings) as own:
        raw = asyncio.run(raw_log(own, max([10_000, *[n for n in arguments.items if n <= 20_000]])))
    print(f"raw log: {raw.rate * EVENTS_AN_ITEM:,.0f} events/s, {raw.rate:,.0f} items/s")
    if arguments.items:
        sizes = sorted(arguments.items)
        for processes in arguments.processes:
            with database(settings) as own:
                own = own.model_copy(update={"run_processes": processes})
                cold, *warm = asyncio.run(ours(own, [sizes[0], *sizes], "engine: dagster"))
            show(f"fan-out on {processes}, new process", cold, raw)
            for measured in warm:
                show(f"fan-out on {processes}", measured, raw)
            best = max([*([best] if best else []), warm[-1]], key=lambda one: one.rate)
            show_costs(cold, warm)
    if arguments.spark:
        with database(settings) as own:
            fanout = "engine: spark, granularity: partition"
            [measured] = asyncio.run(ours(own, [arguments.spark], fanout))
        show("spark partitions, with its start", measured, raw)
    with tempfile.TemporaryDirectory() as folder:
        for name, count, measure in (
            ("in-process", arguments.dagster_items, in_process_rate),
            ("multiprocess", arguments.multiprocess_items, multiprocess_rate),
        ):
            if count:
                rate = measure(count, Path(folder))
                ratio = f", fan-out is {best.rate / rate:,.0f} times as fast" if best else ""
                print(f"plain Dagster dynamic outputs, {name}: {count} items, {rate:.1f} items/s{ratio}")


if __name__ == "__main__":
    main()
