"""What workers can take: reported by themselves, kept in memory, shown in ``noetl.runtime`` (seed P4.2)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import asyncpg
import nats.errors
import orjson
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.attendance import MISSED_REPORTS
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.wire import Id
from noetl_dagster.settings import DEFAULT_POOL, POOL_NAME, Settings

logger = logging.getLogger(__name__)

WAKE_SECONDS = 0.5
"""A worker that was woken and has not reported a change since is thought to have room again after so long."""

Count = Annotated[int, Field(ge=0, lt=2**31)]


class WorkerReport(BaseModel):
    """A worker's capacity report, ``worker.capacity``. Times are in seconds.

    Attributes:
        status: ``ready``, ``draining`` (takes nothing more) or ``stopped``.
        pool: whose commands it takes.
        tool_pools: free places by tool kind, where a kind has fewer than the worker has slots.
        interval: the next report comes after so long, at the latest.
        batch: it claims as many commands as it has room for when it is woken, and needs no notice of each.
        since: an identifier from its start: what was claimed with a smaller one, under its name, is of a process
            that is gone.
    """

    model_config = ConfigDict(frozen=True)

    worker_id: Annotated[str, Field(min_length=1, max_length=256)]
    status: Annotated[str, Field(pattern="^(ready|draining|stopped)$")] = "ready"
    pool: Annotated[str, Field(pattern=POOL_NAME)] = DEFAULT_POOL
    slots: Count = 0
    available_slots: Count = 0
    active_tasks: Count = 0
    tool_pools: dict[str, Count] = Field(default_factory=dict)
    interval: Annotated[float, Field(gt=0, le=3600)] = 15.0
    batch: bool = False
    since: Id | None = None
    meta: dict[str, Any] = Field(default_factory=dict, description="version, host, transport: for people")


@dataclass(slots=True)
class WorkerCapacity:
    """A worker as this process knows it. ``sent`` counts commands sent to it since its latest report."""

    report: WorkerReport
    heard: float
    sent: dict[str, int] = field(default_factory=dict)
    woken: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it takes commands."""
        return self.report.status == "ready" and not self.lost

    def free(self, tool_kind: str) -> int:
        """Commands of a tool kind that it can take now."""
        if self.report.status != "ready":
            return 0
        slots = self.report.available_slots - sum(self.sent.values())
        pool = self.report.tool_pools.get(tool_kind)
        return slots if pool is None else min(slots, pool - self.sent.get(tool_kind, 0))

    @property
    def lost(self) -> bool:
        """Whether it stopped, or has not been heard of for several intervals."""
        silent = time.monotonic() - self.heard > MISSED_REPORTS * self.report.interval
        return silent or self.report.status == "stopped"


class CapacityRegistry:
    """Capacity by worker, in memory only: after a restart the workers' next reports fill it again."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerCapacity] = {}

    def heard(self, report: WorkerReport) -> None:
        """Takes a worker's report."""
        self.workers[report.worker_id] = WorkerCapacity(report, time.monotonic())

    def expect(self, worker_id: str, interval: float) -> None:
        """Knows a worker by what an earlier process left to it; it is lost unless it reports from now on.

        Args:
            interval: seconds between its reports, as far as one can tell.
        """
        if worker_id not in self.workers:
            unheard = WorkerReport(worker_id=worker_id, interval=interval)
            self.workers[worker_id] = WorkerCapacity(unheard, time.monotonic())

    def excuse(self) -> None:
        """Counts the silence of every worker from now on: nobody could be heard."""
        now = time.monotonic()
        for worker in self.workers.values():
            if not worker.lost:
                worker.heard = now

    def pick(self, tool_kind: str, pool: str = DEFAULT_POOL) -> str | None:
        """The worker of a pool with most room for a command of this kind, which it is then counted against."""
        best = max(
            (worker for worker in self._of(pool) if not worker.lost),
            key=lambda worker: worker.free(tool_kind),
            default=None,
        )
        if best is None or best.free(tool_kind) <= 0:
            return None
        best.sent[tool_kind] = best.sent.get(tool_kind, 0) + 1
        return best.report.worker_id

    def _of(self, pool: str) -> Iterator[WorkerCapacity]:
        return (worker for worker in self.workers.values() if worker.report.pool == pool)

    def attended(self, pool: str) -> bool:
        """Whether a worker of the pool takes commands."""
        return any(worker.ready for worker in self._of(pool))

    def some_single(self) -> bool:
        """Whether there are workers that need a notice of each command; nobody known may be such a one.

        They are of a version that knows one pool.
        """
        known = [worker.report.batch for worker in self._of(DEFAULT_POOL) if worker.ready]
        return not known or not all(known)

    def some_batch(self, pool: str = DEFAULT_POOL) -> bool:
        """Whether there are workers of a pool that claim in batches."""
        return any(worker.report.batch for worker in self._of(pool) if worker.ready)

    def to_wake(self, commands: int, kinds: Collection[str], pool: str = DEFAULT_POOL) -> list[str]:
        """Workers of a pool to be told of so many commands: those with most room, with some to spare.

        None of them when all together have not enough room, as far as one knows: then all are to be told.
        """
        now = time.monotonic()
        ready = [worker for worker in self._of(pool) if worker.report.batch and worker.ready]
        for worker in ready:
            if now - worker.woken > WAKE_SECONDS:
                worker.sent.clear()
        chosen: list[WorkerCapacity] = []
        room = 0
        rooms = [(max(one.free(kind) for kind in kinds), one) for one in ready]
        for free, worker in sorted(rooms, key=lambda pair: -pair[0]):
            if free <= 0 or (room >= 2 * commands and len(chosen) >= 2):
                break
            chosen.append(worker)
            room += free
        if room < commands:
            return []
        for worker in chosen:
            worker.sent[""] = worker.sent.get("", 0) + min(worker.free(""), commands)
            worker.woken = now
        return [worker.report.worker_id for worker in chosen]

    def absent(self) -> list[str]:
        """Workers that will not take what was sent to them: lost, stopped or draining."""
        return [
            name for name, worker in self.workers.items() if worker.lost or worker.report.status != "ready"
        ]

    def lives(self) -> dict[str, int]:
        """Workers by name that say since when they live."""
        reports = [worker.report for worker in self.workers.values()]
        return {report.worker_id: report.since for report in reports if report.since is not None}

    def lost(self) -> list[str]:
        """Workers whose claims are void. A draining worker still ends what it claimed."""
        return [name for name, worker in self.workers.items() if worker.lost]


class CapacityListener:
    """Keeps a registry up to date from the workers' reports over NATS."""

    def __init__(self, client: NatsClient, settings: Settings) -> None:
        self._client = client
        self._names = Names.of(settings)
        self._subscription: Any = None
        self._heard = asyncio.Event()
        self.registry = CapacityRegistry()

    async def open(self) -> None:
        """Listens, and asks every worker to report at once."""
        self._subscription = await self._client.subscribe(f"{self._names.capacity}.*", cb=self._receive)
        await self._client.publish(f"{self._names.capacity}.report.now", b"")

    async def first_report(self, patience: float) -> None:
        """Waits until a worker has reported, for ``patience`` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._heard.wait()

    async def close(self) -> None:
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def _receive(self, message: Msg) -> None:
        report = parse_report(message.data)
        if report is not None:
            await self._take(report)
            self._heard.set()

    async def _take(self, report: WorkerReport) -> None:
        self.registry.heard(report)


class CapacityKeeper(CapacityListener):
    """As its base, and writes the reports to ``noetl.runtime`` for people and for ``GET /api/workers``."""

    def __init__(self, client: NatsClient, pool: asyncpg.Pool, settings: Settings) -> None:
        super().__init__(client, settings)
        self._pool = pool

    async def _take(self, report: WorkerReport) -> None:
        await super()._take(report)
        try:
            await put_worker(self._pool, report)
        except DATABASE_AWAY as error:
            logger.debug("capacity of %s is not written: %s", report.worker_id, error)


async def put_worker(pool: asyncpg.Pool, report: WorkerReport) -> None:
    """Writes a report to ``noetl.runtime``."""
    capacity = report.model_dump(
        include={"pool", "slots", "available_slots", "active_tasks", "tool_pools", "interval", "batch"}
    )
    await pool.execute(queries.PUT_WORKER, report.worker_id, report.status, capacity, report.meta)


async def publish_report(client: NatsClient, settings: Settings, report: WorkerReport) -> None:
    """Sends a report to everybody who listens."""
    subject = Names.of(settings).capacity_of(report.worker_id)
    await client.publish(subject, report.model_dump_json().encode())


async def wake_all(client: NatsClient, settings: Settings, commands: int, pool: str = DEFAULT_POOL) -> None:
    """Tells every worker of a pool that so many commands wait. Who misses it hears of them a little later."""
    with contextlib.suppress(nats.errors.Error, OSError):
        await client.publish(Names.of(settings).wake_all(pool), orjson.dumps({"commands": commands}))


def parse_report(content: bytes) -> WorkerReport | None:
    """The report of a message; None for anything else."""
    try:
        return WorkerReport.model_validate_json(content)
    except ValidationError as error:
        logger.warning(
            "not a capacity report: %s", error.errors(include_url=False, include_input=False)[0]["msg"]
        )
        return None
