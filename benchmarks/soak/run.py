"""One run of the soak test: its services, its load, its samples, and its end."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.soak import playbooks
from benchmarks.soak.executions import Load, Outcome
from benchmarks.soak.processes import Processes
from benchmarks.soak.sampling import (
    LogSampler,
    ProcessSampler,
    Recorder,
    StreamSampler,
    WrittenEvents,
    folder_megabytes,
)
from noetl_dagster import embedded
from noetl_dagster.cli.app import COMMANDS
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.settings import EventTransport, Settings

DRAIN_SHARE = 0.08
"""Share of the time that is left for executions to end, and for the counts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        executions: at once.
        items: of a large loop.
        rate: iterations of large loops a second.
        pause: seconds of an item in the pool, on average.
        churn: seconds between two changes of the workers.
        sample: seconds between two samples.
    """

    minutes: float
    seed: int
    executions: int = 200
    items: int = 1_000_000
    rate: float = 900.0
    workers: int = 4
    slots: int = 16
    pause: float = 0.5
    churn: float = 20.0
    sample: float = 10.0

    @property
    def load_seconds(self) -> float:
        return 60 * self.minutes * (1 - DRAIN_SHARE)

    @property
    def partition_seconds(self) -> float:
        """The width of a partition of the log: an hour stands for a day of partitions of 72 minutes."""
        return max(60.0, 60 * self.minutes / 20)

    @property
    def retention_seconds(self) -> float:
        return 2 * self.partition_seconds

    def settings(self, home: Path, folder: Path) -> Settings:
        return Settings(
            home=home,
            playbooks_path=folder,
            event_transport=EventTransport.NATS,
            service_rate=1e6,
            engine_at_once=self.executions + 1,
            worker_slots=self.slots,
            worker_heartbeat_seconds=5.0,
            worker_drain_seconds=10.0,
            command_heartbeat_seconds=5.0,
            command_heartbeat_timeout_seconds=20.0,
            partition_hours=self.partition_seconds / 3600,
            retention_days=self.retention_seconds / 86_400,
            stores_shared=False,
        )


@dataclass(slots=True)
class Result:
    """What a run found.

    Attributes:
        events: written into the log while the load lasted.
        interrupted: why the run ended before its time, empty if it did not.
        problems: reasons for which the run failed, beside growing series.
    """

    plan: Plan
    recorder: Recorder
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    seconds: float = 0.0
    events: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    counts: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    server: str = ""
    verified: str = "not available in this version"
    interrupted: str = ""
    problems: list[str] = field(default_factory=list)


class Soak:
    """A run with its processes. :meth:`run` fills :attr:`result`, whatever happens meanwhile."""

    def __init__(self, plan: Plan, settings: Settings, folder: Path) -> None:
        self.plan = plan
        self.settings = settings
        self.result = Result(plan, Recorder())
        self._folder = folder
        self._rng = random.Random(plan.seed)
        self._processes = Processes(settings, folder)
        self._written = WrittenEvents()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        try:
            async with self._serving() as (url, pool):
                load = Load(url, pool, self._rng, pause=self.plan.pause)
                self.result.outcome, self.result.recorder = load.outcome, Recorder()
                self.result.server = str(await pool.fetchval("SHOW server_version"))
                try:
                    await self._under_load(load, pool)
                    await self._check(pool)
                finally:
                    await load.close()
        finally:
            await asyncio.to_thread(self._processes.close)
            self.result.counts = dict(self._processes.counts)
            self.result.messages = dict(self._processes.messages())

    def _interrupt(self) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self.result.interrupted = "by a signal"
        self._stop.set()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[tuple[str, asyncpg.Pool[Any]]]:
        url = await self._processes.serve()
        self._processes.settings = self.settings.model_copy(update={"server_url": url})
        for _ in range(self.plan.workers):
            self._processes.start_worker()
        async with asyncpg.create_pool(self.settings.db_url, min_size=2, max_size=4) as pool:
            await pool.execute(playbooks.SCHEMA)
            yield url, pool

    async def _under_load(self, load: Load, pool: asyncpg.Pool[Any]) -> None:
        """Runs until the time of the load is over, a signal comes, or something fails; then waits for executions."""
        until = time.monotonic() + self.plan.load_seconds
        lanes = [load.lane() for _ in range(self.plan.executions)]
        background = [self._churn(), self._maintain(), self._sample(load, pool)]
        posting = [asyncio.create_task(one) for one in (*lanes, load.loops(self.plan.items, self.plan.rate, until))]
        working = [asyncio.create_task(one) for one in background]
        follower, stop = asyncio.create_task(load.follow()), asyncio.create_task(self._stop.wait())
        watched: list[asyncio.Task[Any]] = [*working, follower, stop, asyncio.create_task(_first_failure(posting))]
        try:
            done, _ = await asyncio.wait(watched, timeout=until - time.monotonic(), return_when="FIRST_COMPLETED")
            self._note_failures(done)
            self.result.seconds = load_ended = self.result.recorder.seconds
            load.stopping.set()
            for task in working:
                task.cancel()
            self.result.events = await self._written.count(pool)
            _say(load_ended, f"the load ends; {load.running} executions are still running")
            await asyncio.wait(posting, timeout=max(60.0, 60 * self.plan.minutes * DRAIN_SHARE))
            if load.running and not self.result.interrupted:
                self.result.problems.append(f"executions that did not end in time: {dict(load.unfinished())}")
        finally:
            for task in (*posting, *watched):
                task.cancel()
            await asyncio.wait([*posting, *watched])

    def _note_failures(self, done: set[asyncio.Task[Any]]) -> None:
        for task in done:
            if (error := task.exception()) is not None:
                self.result.interrupted = f"by {error!r}"
                self.result.problems.append(f"the run was interrupted by {error!r}")

    async def _churn(self) -> None:
        """Starts, drains and kills workers in turn."""
        processes, plan = self._processes, self.plan
        while True:
            await asyncio.sleep(plan.churn * self._rng.uniform(0.5, 1.5))
            if processes.workers > plan.workers - 1:
                processes.end_worker(self._rng)
            else:
                processes.start_worker()
            if gone := processes.exited():
                raise RuntimeError(f"processes ended that were not told to: {gone}")

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self.plan.partition_seconds / 2)
            code, text = await self._processes.run("maintain", "maintain")
            if code:
                raise RuntimeError(f"maintain ended with {code}: {text}")
            self.result.dropped += text.partition("dropped: ")[2].partition(" with ")[0].count("event_")

    async def _sample(self, load: Load, pool: asyncpg.Pool[Any]) -> None:
        client = await connect(self.settings, "soak")
        recorder = self.result.recorder
        processes = ProcessSampler(recorder)
        log, stream = LogSampler(recorder, pool), StreamSampler(recorder, client, NatsNames(self.settings))
        store = self.settings.home / "object_store"
        try:
            while True:
                began = time.monotonic()
                await asyncio.to_thread(processes.sample, self._processes.roles())
                await log.sample()
                await stream.sample()
                recorder.add("store: size on disk", await asyncio.to_thread(folder_megabytes, store), "MB")
                recorder.add("executions at once", load.running)
                self._say_progress(load, await self._written.count(pool))
                await asyncio.sleep(max(0.1, began + self.plan.sample - time.monotonic()))
        finally:
            await client.close()

    def _say_progress(self, load: Load, written: int) -> None:
        last = {name: one.values[-1] for name, one in self.result.recorder.series.items()}
        seconds, outcome = self.result.recorder.seconds, load.outcome
        _say(
            seconds,
            f"{written:,} events, {written / max(seconds, 1):,.0f} a second; {load.running} executions, "
            f"{outcome.executions.total():,} ended, {len(outcome.failed)} failed, {outcome.lost} lost, "
            f"{outcome.doubled} doubled; {last['queue: queued']:.0f} queued, {last['projection: lag']:.1f} s behind, "
            f"{last['log: partitions']:.0f} partitions, drivers {last['drivers: memory']:.0f} MB",
        )

    async def _check(self, pool: asyncpg.Pool[Any]) -> None:
        """Checks the log at the end, and that nothing is left of executions that ended."""
        left = await pool.fetchval("SELECT count(*) FROM noetl.queue")
        rows = await pool.fetchval("SELECT (SELECT count(*) FROM soak_row) + (SELECT count(*) FROM soak_job)")
        dead = await pool.fetchval("SELECT count(*) FROM noetl.dead_letter")
        if not self.result.interrupted:
            for count, text in ((left, "commands left in the queue"), (rows, "rows left in tables of sinks")):
                if count:
                    self.result.problems.append(f"{count} {text}")
        if dead:
            self.result.problems.append(f"{dead} dead letters")
        if "verify" in COMMANDS:
            limit = max(60.0, 60 * self.plan.minutes * DRAIN_SHARE)
            code, text = await self._processes.run("verify", "verify", "--all", seconds=limit)
            lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
            if code == -signal.SIGKILL:
                lines = [f"no result after {limit:.0f} s"]
            self.result.verified = f"exit code {code}: {lines[-1]}"
            if code:
                self.result.problems += [f"'noetl-dagster verify --all': {line}" for line in lines[:20]]


async def _first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Returns when one of the tasks has failed, with its error; never otherwise."""
    await asyncio.wait(tasks, return_when="FIRST_EXCEPTION")
    for task in tasks:
        if task.done():
            task.result()
    await asyncio.Event().wait()


def _say(seconds: float, text: str) -> None:
    print(f"{seconds / 60:5.1f} min: {text}", flush=True)


def soak(plan: Plan) -> Result:
    """Runs the soak test on servers of its own, and ends them."""
    with tempfile.TemporaryDirectory(prefix="noetl-soak-") as name:
        folder = Path(name)
        playbooks.write(folder / "playbooks")
        settings = embedded.ensure(plan.settings(folder / "home", folder / "playbooks"))
        try:
            run = Soak(plan, settings, folder)
            try:
                asyncio.run(run.run())
            except KeyboardInterrupt:
                run.result.interrupted = "by two signals"
            return run.result
        finally:
            embedded.down(settings)
