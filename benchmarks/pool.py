"""The pool of workers against the same fan-out inside one process, and how it grows with workers.

    python -m benchmarks.pool                            the goals: rate, processor time, issue to start
    python -m benchmarks.pool --growth 1 2 4 8 --apis 1 3    sleeping tools, where cores do not bind

All in one run, on the embedded services: ``serve``, workers over NATS and HTTP, each a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.fanout import PLAYBOOK, TRIVIAL, database
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings

LONE = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: lone, path: bench/lone}
workflow:
  - step: one
    spec: {dispatch: workers}
    tool: {kind: python, code: "import time\\nresult = time.time()"}
"""
STARTED = """
SELECT (ended.result -> 'data')::float8 - extract(epoch FROM issued.created_at)::float8 AS seconds
FROM noetl.event issued JOIN noetl.event ended USING (execution_id)
WHERE execution_id = $1 AND issued.event_type = 'command.issued' AND ended.event_type = 'command.completed'
"""
RATE_GOAL, P99_GOAL, LINEAR = 0.75, 0.020, 0.9
PATIENCE_SECONDS = 60


@dataclass
class Processes:
    """The processes that a measurement is about, by what they are, and the processor time of each kind."""

    of_kind: dict[str, list[psutil.Process]] = field(default_factory=dict)

    def seconds(self) -> dict[str, float]:
        return {
            kind: sum(_cpu(one) for top in tops for one in [top, *_children(top)])
            for kind, tops in self.of_kind.items()
        }


def _cpu(process: psutil.Process) -> float:
    """What a process has taken, and those of its children that have ended; ours are accounted for themselves."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    gone = times.children_user + times.children_system if process.pid != os.getpid() else 0.0
    return float(times.user + times.system + gone)


def _children(process: psutil.Process) -> list[psutil.Process]:
    """A server's processes; those that this process has started are accounted for themselves."""
    return process.children(recursive=True) if process.pid != os.getpid() else []


@contextmanager
def process(settings: Settings, *arguments: str, module: str = "noetl_dagster") -> Iterator[subprocess.Popen[str]]:
    """A process of the command line, or of another module, ended with the block."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **embedded.environment(settings)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(PATIENCE_SECONDS)


@contextmanager
def serving(settings: Settings, processes: int = 1) -> Iterator[tuple[Settings, psutil.Process]]:
    """The HTTP API; settings that lead to it."""
    options = ["--processes", str(processes)] if processes > 1 else []
    with process(settings, "serve", "--port", "0", *options) as started:
        assert started.stdout is not None
        address = started.stdout.readline().split()[-1]
        httpx.get(f"{address}/ready").raise_for_status()
        yield settings.model_copy(update={"server_url": address}), psutil.Process(started.pid)


@contextmanager
def working(settings: Settings, count: int, slots: int) -> Iterator[list[psutil.Process]]:
    """Workers of the pool that have said that they are ready."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(process(settings, "worker", "--slots", str(slots), "--id", f"bench-{number}"))
            for number in range(count)
        ]
        deadline = time.monotonic() + 60
        while _ready(settings) < count:
            assert time.monotonic() < deadline, "the workers do not report"
            time.sleep(0.1)
        yield [psutil.Process(worker.pid) for worker in workers]


def _ready(settings: Settings) -> int:
    listing = httpx.get(f"{settings.server_url}/api/workers", headers={CLIENT_HEADER: "benchmark"}).json()["workers"]
    return sum(one["report"]["status"] == "ready" and not one["lost"] for one in listing)


@dataclass(frozen=True)
class Ran:
    items: int
    seconds: float
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        return self.items / self.seconds

    @property
    def milliseconds(self) -> float:
        """Processor time of one item, over all processes."""
        return 1_000 * sum(self.cpu.values()) / self.items

    def __str__(self) -> str:
        share = ", ".join(f"{kind} {1_000 * spent / self.items:.2f}" for kind, spent in self.cpu.items())
        return (
            f"{self.items:>7,} items {self.seconds:7.2f} s {self.rate:8,.0f} items/s, "
            f"CPU {self.milliseconds:.2f} ms an item ({share})"
        )


async def run_fanout(engine: Engine, text: str, items: int, processes: Processes) -> Ran:
    """One execution, from its first event to its last."""
    before, started = processes.seconds(), time.perf_counter()
    state = await engine.run(parse_playbook(text), {"items": items})
    seconds = time.perf_counter() - started
    _check(state)
    after = processes.seconds()
    return Ran(items, seconds, {kind: after[kind] - before[kind] for kind in after})


async def issue_to_start(engine: Engine, commands: int) -> list[float]:
    """Seconds from each issue to the start of the tool, one command after another, slots free."""
    playbook, seconds = parse_playbook(LONE), []
    for _ in range(commands):
        state = await engine.run(playbook)
        assert state.status is ExecutionStatus.COMPLETED, state.error
        seconds.append(await engine.runtime.pool.fetchval(STARTED, state.execution_id))
    return sorted(seconds)


def _check(state: ExecutionState) -> None:
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert not state.latest["fan"].envelope.get("failed")


def services(settings: Settings) -> dict[str, list[psutil.Process]]:
    """The servers of the embedded services. Other backends of PostgreSQL are its children."""
    names, home = {"postgres": "PostgreSQL", "nats-server": "NATS"}, str(settings.home.resolve())
    found: dict[str, list[psutil.Process]] = {}
    for one in psutil.process_iter(["name", "cmdline"]):
        kind = names.get(one.info["name"])
        if kind and any(home in word for word in one.info["cmdline"] or ()):
            found.setdefault(kind, []).append(one)
    return found


async def goals(settings: Settings, arguments: argparse.Namespace) -> None:
    """The same fan-out inside this process and in the pool, in turn."""
    bound = f"max_concurrent: {arguments.concurrent}" if arguments.concurrent else ""
    inline = PLAYBOOK.format(fanout=bound, code=TRIVIAL)
    pooled = PLAYBOOK.format(fanout=f"engine: workers, {bound}", code=TRIVIAL)
    here = {"driver": [psutil.Process()], **services(settings)}
    with (
        serving(settings, arguments.apis[0]) as (led, api),
        working(led, arguments.workers, arguments.slots) as workers,
    ):
        engine = await Engine.open(led.model_copy(update={"run_processes": 1}))
        try:
            all_of_them = {**here, "API": [api], "workers": workers}
            await issue_to_start(engine, 20)  # everybody knows the playbook
            starts = await issue_to_start(engine, arguments.lone)
            p50, p99 = starts[len(starts) // 2], starts[len(starts) * 99 // 100]
            print(
                f"issue to start, {len(starts)} lone commands: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms "
                f"(goal {P99_GOAL * 1e3:.0f})",
                flush=True,
            )
            rates: dict[str, list[float]] = {}
            for turn in range(arguments.turns + 1):
                for name, text, processes in (("inside", inline, here), ("pool", pooled, all_of_them)):
                    ran = await run_fanout(engine, text, arguments.items, Processes(processes))
                    print(f"{name:>8}: {ran}{'' if turn else ' (warming up)'}", flush=True)
                    if turn:
                        rates.setdefault(name, []).append(ran.rate)
            ratio = statistics.median(rates["pool"]) / statistics.median(rates["inside"])
            print(f"pool to inside: {ratio:.2f} (goal {RATE_GOAL})", flush=True)
        finally:
            await engine.close()


def growth(settings: Settings, arguments: argparse.Namespace) -> None:
    """Items a second against workers, on tools that sleep."""
    code = f"import time; time.sleep({arguments.sleep}); result = n"
    for apis in arguments.apis:
        for count in arguments.growth:
            slots = count * arguments.growth_slots
            text = PLAYBOOK.format(fanout=f"engine: workers, max_concurrent: {4 * slots}", code=code)
            items = round(slots * arguments.growth_seconds / arguments.sleep)
            with (
                database(settings) as own,
                serving(own, apis) as (led, api),
                working(led, count, arguments.growth_slots) as workers,
            ):
                processes = Processes({"driver": [psutil.Process()], "API": [api], "workers": workers})
                ran = asyncio.run(_warm_fanout(led, text, slots, items, processes))
            linear = slots / arguments.sleep
            print(
                f"{apis} API, {count} workers of {arguments.growth_slots}: {ran.rate:7.1f} items/s, "
                f"{ran.rate / linear:.2f} of linear (goal {LINEAR}); {ran}",
                flush=True,
            )


async def _warm_fanout(settings: Settings, text: str, few: int, items: int, processes: Processes) -> Ran:
    """A fan-out after a small one: workers know the playbook, connections are open."""
    engine = await Engine.open(settings)
    try:
        await run_fanout(engine, text, few, processes)
        return await run_fanout(engine, text, items, processes)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--concurrent", type=int, default=0, help="max_concurrent; default: as always")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lone", type=int, default=500)
    parser.add_argument("--apis", type=int, nargs="*", default=[1], help="API processes")
    parser.add_argument("--growth", type=int, nargs="*", default=[], help="numbers of workers")
    parser.add_argument("--growth-slots", type=int, default=4)
    parser.add_argument("--growth-seconds", type=float, default=10.0)
    parser.add_argument("--sleep", type=float, default=0.1)
    arguments = parser.parse_args()
    settings = embedded.ensure(Settings(event_transport="nats"))
    print(f"{os.cpu_count()} cores")
    if arguments.growth:
        growth(settings, arguments)
        return
    with database(settings) as own:
        asyncio.run(goals(own, arguments))


if __name__ == "__main__":
    main()
