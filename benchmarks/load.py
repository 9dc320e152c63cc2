"""The pool under load: many workers whose tools sleep, against the real API, NATS, PostgreSQL and drivers.

    python -m benchmarks.load                                   200 workers, the ramp
    python -m benchmarks.load --workers 1 10 50 100 200 --steps 4x0.5
    python -m benchmarks.load --idle 60                         what workers cost that have nothing to do

The workers are played by this process (``benchmarks/_played_workers.py`` says what of a worker is played); drivers
are processes of their own with a real engine. A step of the ramp is ``<slots>x<seconds>``: every worker runs so many
commands at once that take so long on average, which offers ``workers * slots / seconds`` commands a second. Drivers
keep ``--ahead`` times as many commands in flight as there are slots: above 1 some always wait and the rate is what the
whole can do, below 1 a slot is always free and the wait for a claim is that of the protocol alone.

Rates and processor time are those of a window after a warm-up. ``others`` are the cores that other programs took
meanwhile: what they take is missing. Times are p50 / p99; ``end-log`` runs from the end of a tool to the notice of its
commit. Connections are open (active) ones. Bytes of table and indexes are over the whole log, of WAL over the window.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import asyncpg
import nats.js.errors
import psutil
import uvloop

from benchmarks._played_workers import Fleet
from benchmarks.fanout import database
from benchmarks.pool import Processes, process, services, serving
from noetl_dagster import embedded
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.settings import Settings

GOAL = 1e9 / 86_400
"""Events a second."""

FOLLOWS = 0.9
"""A rate of less than this share of what is offered does not follow."""

EXECUTION_SECONDS = 10.0
"""An execution has items for so long, at what is offered."""

SIZES = """
SELECT sum(pg_table_size(relid)) AS tables, sum(pg_indexes_size(relid)) AS indexes
FROM pg_partition_tree('noetl.event') WHERE isleaf
"""
WAITED = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY (meta ->> 'waited')::float8)
FROM noetl.event WHERE event_type = 'command.claimed' AND created_at BETWEEN $1 AND $2
"""
CONNECTED = """
SELECT count(*) AS open, count(*) FILTER (WHERE state = 'active') AS active
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
HEADINGS = (
    "workers", "slots", "sleep", "offered/s", "commands/s", "share", "events/s", "claims/s", "batch",
    "queue-claim ms", "claim ms", "end-log ms", "CPU ms/command", "cores", "others", "connections",
    "WAL/event", "table+index/event", "events/command",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What is offered: each of the workers runs ``slots`` commands at once, of ``sleep`` seconds on average."""

    workers: int
    slots: int
    sleep: float
    ahead: float

    @property
    def offered(self) -> float:
        return min(self.ahead, 1.0) * self.workers * self.slots / self.sleep


@dataclass
class Measured:
    """One step as it was. Times are in seconds, ``cpu`` in cores, ``waits`` p50 and p99."""

    step: Step
    commands: float = 0.0
    events: float = 0.0
    claims: float = 0.0
    batch: float = 0.0
    reports: float = 0.0
    waited: Sequence[float] = (0.0, 0.0)
    asked: Sequence[float] = (0.0, 0.0)
    logged: Sequence[float] = (0.0, 0.0)
    cpu: dict[str, float] = field(default_factory=dict)
    others: float = 0.0
    connections: tuple[int, int] = (0, 0)
    wal: float = 0.0
    tables: float = 0.0
    indexes: float = 0.0
    an_end: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def system(self) -> float:
        """Cores without the generator's."""
        return sum(spent for kind, spent in self.cpu.items() if kind != "generator")

    @property
    def share(self) -> float:
        return self.commands / self.step.offered

    def cells(self) -> list[str]:
        step, ms = self.step, lambda pair: " / ".join(f"{1e3 * one:.0f}" for one in pair)
        each = 1e3 / self.commands if self.commands else 0.0
        return [
            f"{step.workers}", f"{step.slots}", f"{step.sleep:g}", f"{step.offered:,.0f}", f"{self.commands:,.0f}",
            f"{self.share:.2f}", f"{self.events:,.0f}", f"{self.claims:,.0f}", f"{self.batch:.1f}",
            ms(self.waited), ms(self.asked), ms(self.logged),
            " ".join(f"{kind} {each * spent:.2f}" for kind, spent in self.cpu.items()),
            " ".join(f"{kind} {spent:.2f}" for kind, spent in self.cpu.items()), f"{self.others:.2f}",
            f"{self.connections[0]} ({self.connections[1]})", f"{self.wal:,.0f}",
            f"{self.tables:,.0f}+{self.indexes:,.0f}", f"{self.an_end:.2f}",
        ]  # fmt: skip


def busy() -> float:
    """Processor seconds of this machine since it was started, whoever took them."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    found = sorted(seconds) or [0.0]
    return found[len(found) // 2], found[len(found) * 99 // 100]


@contextmanager
def apart(settings: Settings) -> Iterator[Settings]:
    """A database and NATS names of its own, so that nothing is left of an earlier step; the bucket is one for all."""
    name = f"load{uuid.uuid4().hex[:8]}"
    own = {"nats_namespace": name, "minio_bucket": "load"}
    with database(settings) as made:
        try:
            yield made.model_copy(update=own)
        finally:
            asyncio.run(_forget(made.model_copy(update=own)))


async def _forget(settings: Settings) -> None:
    client, names = await connect(settings, "load"), NatsNames(settings)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await client.jetstream()._jsm.delete_stream(names.event_stream)
    await client.close()


@contextmanager
def driving(settings: Settings, step: Step, arguments: argparse.Namespace) -> Iterator[list[psutil.Process]]:
    """Drivers that keep the workers busy, until they are killed."""
    executions = arguments.drivers * arguments.executions
    items = max(round(step.offered * EXECUTION_SECONDS / executions), 100)
    in_flight = max(round(step.ahead * step.workers * step.slots / executions), 1)
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(
                process(
                    settings,
                    *map(str, (arguments.executions, items, in_flight)),
                    module="benchmarks._load_driver",
                )
            )
            for _ in range(arguments.drivers)
        ]
        try:
            yield [psutil.Process(driver.pid) for driver in drivers]
        finally:
            for driver in drivers:  # what they leave behind nobody reads
                driver.kill()


async def watch(
    settings: Settings, fleet: Fleet, step: Step, of_kind: dict[str, list[psutil.Process]], seconds: float
) -> Measured:
    """What happens within so many seconds."""
    connection, processes = await asyncpg.connect(settings.db_url), Processes(of_kind)
    try:
        before, written = processes.seconds(), await connection.fetchval("SELECT pg_current_wal_lsn()")
        counted = await connection.fetchval("SELECT count(*) FROM noetl.event")
        begun = await connection.fetchval("SELECT clock_timestamp()")
        fleet.begin()
        started, connections, machine = time.monotonic(), [], busy()
        while time.monotonic() - started < seconds:
            await asyncio.sleep(seconds / 8)
            connections.append(tuple(await connection.fetchrow(CONNECTED)))
        passed, after = time.monotonic() - started, processes.seconds()
        others = (busy() - machine) / passed - sum(after[kind] - before[kind] for kind in after) / passed
        ended, requests, logged, asked = len(fleet.logged), fleet.requests, fleet.logged, fleet.asked
        reports, lost = fleet.reports, dict(fleet.lost)
        wal = await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), $1)::float8", written)
        over = await connection.fetchval("SELECT clock_timestamp()")
        events = await connection.fetchval("SELECT count(*) FROM noetl.event") - counted
        return Measured(
            step,
            commands=ended / passed,
            events=events / passed,
            claims=requests.total() / passed,
            batch=sum(size * count for size, count in requests.items()) / max(requests.total(), 1),
            reports=reports / passed,
            waited=await connection.fetchval(WAITED, begun, over) or (0.0, 0.0),
            asked=percentiles(asked),
            logged=percentiles(logged),
            cpu={kind: (after[kind] - before[kind]) / passed for kind in after},
            connections=max(connections),
            others=max(others, 0.0),
            wal=wal / max(events, 1),
            lost=lost,
        )
    finally:
        await connection.close()


async def sizes(settings: Settings, measured: Measured) -> None:
    """What the log takes on the disk, over all that is in it."""
    connection = await asyncpg.connect(settings.db_url)
    try:
        events = await connection.fetchval("SELECT count(*) FROM noetl.event")
        ends = await connection.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'loop.shard.done'")
        record = await connection.fetchrow(SIZES)
        measured.tables, measured.indexes = (float(one) / max(events, 1) for one in record)
        measured.an_end = events / max(ends, 1)
    finally:
        await connection.close()


async def measure(
    settings: Settings, step: Step, arguments: argparse.Namespace, servers: dict[str, list[psutil.Process]]
) -> Measured:
    fleet = Fleet(settings, step.workers, step.slots, step.sleep, arguments.jitter)
    of_kind = {**servers, "generator": [psutil.Process()]}
    await fleet.open()
    try:
        if arguments.idle:
            await asyncio.sleep(arguments.warm_up)
            return await watch(settings, fleet, step, of_kind, arguments.idle)
        with driving(settings, step, arguments) as drivers:
            await asyncio.sleep(arguments.warm_up)
            measured = await watch(settings, fleet, step, {"driver": drivers, **of_kind}, arguments.seconds)
        await sizes(settings, measured)
        return measured
    finally:
        await fleet.close()


def show(measured: Sequence[Measured]) -> None:
    """A table in Markdown, and where the rate does not follow any more."""
    print("| " + " | ".join(HEADINGS) + " |\n|" + " --: |" * len(HEADINGS))
    for one in measured:
        print("| " + " | ".join(one.cells()) + " |")
    knee = next((one for one in measured if one.share < FOLLOWS), None)
    best = max(measured, key=lambda one: one.commands)
    if knee is None:
        print(f"the rate follows the load up to {best.commands:,.0f} commands a second")
    else:
        cpu = sorted(knee.cpu.items(), key=lambda pair: -pair[1])
        busy = sum(knee.cpu.values())
        print(
            f"knee: offered {knee.step.offered:,.0f}, done {knee.commands:,.0f} commands a second; "
            f"{busy:.2f} of {os.cpu_count()} cores, most of it {cpu[0][0]} ({cpu[0][1]:.2f}) and "
            f"{cpu[1][0]} ({cpu[1][1]:.2f})"
        )
    print(
        f"best: {best.commands:,.0f} commands and {best.events:,.0f} events a second, {best.events / best.system:,.0f} "
        f"events a second and core without the generator; the goal is {GOAL:,.0f} events a second",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[200])
    parser.add_argument(
        "--steps", nargs="*", default=["1x1", "2x1", "4x1", "4x0.67", "4x0.5", "4x0.33", "4x0.25", "4x0.12"]
    )
    parser.add_argument("--ahead", type=float, default=2.0, help="commands in flight for each slot")
    parser.add_argument("--jitter", type=float, default=0.5, help="share by which a tool's time varies")
    parser.add_argument("--apis", type=int, nargs="*", default=[1], help="API processes")
    parser.add_argument("--drivers", type=int, default=1, help="driver processes")
    parser.add_argument("--executions", type=int, default=4, help="executions at once in each driver")
    parser.add_argument("--run-processes", type=int, default=1, help="processes of one driver")
    parser.add_argument("--warm-up", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds for which workers have nothing to do")
    arguments = parser.parse_args()
    given = Settings(event_transport="nats", run_processes=arguments.run_processes, service_rate=1e6)
    settings = embedded.ensure(given)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    steps = ["1x1"] if arguments.idle else arguments.steps
    for apis in arguments.apis:
        for workers in arguments.workers:
            print(f"\n{apis} API, {arguments.drivers} drivers of {arguments.executions} executions", flush=True)
            found = []
            for text in steps:
                slots, _, sleep = text.partition("x")
                step = Step(workers, int(slots), float(sleep), arguments.ahead)
                with apart(settings) as own, serving(own, apis) as (led, api):
                    servers = {"API": [api], **services(settings)}
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        measured = runner.run(measure(led, step, arguments, servers))
                found.append(measured)
                line = dict(zip(HEADINGS, measured.cells(), strict=True))
                print(line, f"reports/s {measured.reports:.0f}", measured.lost or "", flush=True)
            if not arguments.idle:
                show(found)


if __name__ == "__main__":
    main()
