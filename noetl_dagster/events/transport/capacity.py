"""The capacity of workers, as they report it: kept in memory, and shown in ``noetl.runtime``.

It decides which workers are notified of waiting commands. Any worker of the pool may claim them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import asyncpg
import nats.errors
import orjson
from nats.aio.msg import Msg
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from noetl_dagster.errors import first_invalid
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.nats import NatsClient
from noetl_dagster.events.transport.queries import MISSED_REPORTS
from noetl_dagster.events.transport.wire import Id
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import DEFAULT_POOL, POOL_NAME
from noetl_dagster.values import encode_json, legible

logger = logging.getLogger(__name__)

WRITE_SECONDS = 0.5
"""Reports are written at most this often, those of many workers together."""

TARGETED_SECONDS = 0.5
"""A worker that was notified and reports no change within this time is assumed to have capacity again."""

MOST_WORKERS = 10_000
"""Workers whose capacity is kept; lost ones make room for others."""

META_BYTES = 4 * 1024
MOST_TOOL_KINDS = 64

Count = Annotated[int, Field(ge=0, lt=2**31)]


def _small(meta: dict[str, Any]) -> dict[str, Any]:
    if len(encode_json(meta)) > META_BYTES:
        raise ValueError(f"meta of a worker's report is larger than {META_BYTES} bytes of JSON")
    return meta


class WorkerReport(BaseModel, frozen=True):
    """A worker's capacity report, ``worker.capacity``.

    Attributes:
        worker_id: name of the worker.
        status: ``ready``, ``draining`` (claims nothing more) or ``stopped``.
        pool: the pool whose commands it claims.
        slots: commands that it can run at once.
        available_slots: free slots.
        active_tasks: commands that it runs now.
        tool_pools: free slots by tool kind, for kinds with fewer than the worker has slots.
        interval: most seconds until the next report.
        since: an identifier from its start: commands claimed under its name with a smaller one belong to an
            earlier process.
    """

    worker_id: Annotated[str, Field(min_length=1, max_length=256)]
    status: Annotated[str, Field(pattern="^(ready|draining|stopped)$")] = "ready"
    pool: Annotated[str, Field(pattern=POOL_NAME)] = DEFAULT_POOL
    slots: Count = 0
    available_slots: Count = 0
    active_tasks: Count = 0
    tool_pools: dict[Annotated[str, Field(max_length=64)], Count] = Field(
        default_factory=dict, max_length=MOST_TOOL_KINDS
    )
    interval: Annotated[float, Field(gt=0, le=3600)] = 15.0
    since: Id | None = None
    meta: Annotated[dict[str, Any], AfterValidator(_small)] = Field(
        default_factory=dict, description="version, host, transport: for people"
    )


@dataclass(slots=True)
class WorkerCapacity:
    """A worker as this process knows it.

    Attributes:
        heard: when its latest report arrived, monotonic.
        targeted: commands that it was notified of since that report, at ``targeted_at``.
    """

    report: WorkerReport
    heard: float
    targeted: int = 0
    targeted_at: float = 0.0

    def free(self, tool_kind: str) -> int:
        """Returns how many commands of a tool kind it can start now."""
        if self.report.status != "ready":
            return 0
        slots = self.report.available_slots - self.targeted
        return min(slots, self.report.tool_pools.get(tool_kind, slots))

    @property
    def lost(self) -> bool:
        """True if it stopped, or has not reported for several intervals."""
        silent = time.monotonic() - self.heard > MISSED_REPORTS * self.report.interval
        return silent or self.report.status == "stopped"


class CapacityRegistry:
    """Capacity by worker, in memory only: after a restart the workers' next reports fill it again."""

    def __init__(self) -> None:
        self.workers: dict[tuple[str, str], WorkerCapacity] = {}

    def heard(self, report: WorkerReport) -> None:
        """Stores a worker's report; one of a further worker is ignored while :data:`MOST_WORKERS` are not lost."""
        key = (report.pool, report.worker_id)
        if key not in self.workers and len(self.workers) >= MOST_WORKERS:
            self.workers = {name: worker for name, worker in self.workers.items() if not worker.lost}
            if len(self.workers) >= MOST_WORKERS:
                return
        self.workers[key] = WorkerCapacity(report, time.monotonic())

    def expect(self, worker_id: str, interval: float, pool: str = DEFAULT_POOL) -> None:
        """Adds a worker that holds commands of an earlier process; it is lost unless it reports from now on."""
        if (pool, worker_id) not in self.workers:
            self.heard(WorkerReport(worker_id=worker_id, interval=interval, pool=pool))

    def excuse(self) -> None:
        """Counts the silence of every worker from now on, because no report could arrive."""
        now = time.monotonic()
        for worker in self.workers.values():
            if not worker.lost:
                worker.heard = now

    def attending(self, pool: str) -> int:
        """Returns how many workers of the pool claim commands."""
        return sum(1 for _ in self._ready(pool))

    def targets(self, commands: int, kinds: Collection[str], pool: str = DEFAULT_POOL) -> list[str]:
        """Returns the workers of a pool to notify of so many commands: those with the most capacity, some in reserve.

        Returns none if their capacity together is not known to be enough: then all are notified.
        """
        now = time.monotonic()
        ready = list(self._ready(pool))
        for worker in ready:
            if now - worker.targeted_at > TARGETED_SECONDS:
                worker.targeted = 0
        chosen: list[WorkerCapacity] = []
        capacity = 0
        capacities = [(max(one.free(kind) for kind in kinds), one) for one in ready]
        for free, worker in sorted(capacities, key=lambda pair: -pair[0]):
            if free <= 0 or (capacity >= 2 * commands and len(chosen) >= 2):
                break
            chosen.append(worker)
            capacity += free
        if capacity < commands:
            return []
        for worker in chosen:
            worker.targeted += min(worker.free(""), commands)
            worker.targeted_at = now
        return [worker.report.worker_id for worker in chosen]

    def lives(self) -> list[tuple[str, str, int]]:
        """Returns worker, pool and the identifier from its start for each worker that reports one."""
        reports = [worker.report for worker in self.workers.values()]
        return [(report.worker_id, report.pool, report.since) for report in reports if report.since is not None]

    def lost(self) -> list[tuple[str, str]]:
        """Returns worker and pool of void claims. A draining worker still ends the commands that it claimed."""
        return [(worker_id, pool) for (pool, worker_id), worker in self.workers.items() if worker.lost]

    def _ready(self, pool: str) -> Iterator[WorkerCapacity]:
        mine = (worker for worker in self.workers.values() if worker.report.pool == pool)
        return (worker for worker in mine if worker.report.status == "ready" and not worker.lost)


class CapacityListener:
    """Keeps a registry up to date from the workers' reports over NATS.

    Args:
        pool: also writes the reports to ``noetl.runtime``, for people and for ``GET /api/workers``.
    """

    def __init__(self, client: NatsClient, pool: asyncpg.Pool | None = None) -> None:
        self._client = client
        self._pool = pool
        self._subscription: Any = None
        self._unwritten: dict[tuple[str, str], WorkerReport] = {}
        self._writing: asyncio.Task[None] | None = None
        self.registry = CapacityRegistry()

    async def open(self) -> None:
        """Subscribes, and asks every worker to report at once."""
        prefix = self._client.names.capacity
        self._subscription = await self._client.subscribe(f"{prefix}.*.*", cb=self._receive)
        await self._client.publish(f"{prefix}.report.now", b"")

    async def close(self) -> None:
        """Ends the subscriptions, and writes the last reports."""
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()
        if self._writing is not None:
            await cancel_and_wait(self._writing)
            await self._write_reports()

    async def _receive(self, message: Msg) -> None:
        names = self._client.names
        if message.subject == f"{names.capacity}.report.now":
            return
        try:
            report = WorkerReport.model_validate_json(message.data)
        except ValidationError as error:
            logger.warning("not a capacity report: %s", first_invalid(error))
            return
        if message.subject != names.capacity_of(report.pool, report.worker_id):
            logger.warning(
                "report on %s ignored: it names worker %s of pool %s", message.subject, report.worker_id, report.pool
            )
            return
        self.registry.heard(report)
        if self._pool is not None:
            self._unwritten[report.pool, report.worker_id] = report
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._keep_writing())

    async def _keep_writing(self) -> None:
        """Writes reports, the first at once, until there are none for a while."""
        while self._unwritten:
            await self._write_reports()
            await asyncio.sleep(WRITE_SECONDS)

    async def _write_reports(self) -> None:
        """Writes the latest report of each worker; of two pools with a worker of one name, one after the other."""
        assert self._pool is not None
        while self._unwritten:
            reports = {report.worker_id: report for report in reversed([*self._unwritten.values()])}
            for report in reports.values():
                del self._unwritten[report.pool, report.worker_id]
            try:
                await put_workers(self._pool, [*reports.values()])
            except DATABASE_AWAY as error:
                logger.debug("the capacities of %d workers are not written: %s", len(reports), error)
            except asyncpg.PostgresError:
                logger.exception("the capacities of %d workers are not written", len(reports))


async def put_worker(pool: asyncpg.Pool, report: WorkerReport) -> str | None:
    """Writes a report to ``noetl.runtime``; returns another pool for which a worker of that name reports, else None."""
    return (await put_workers(pool, [report])).get(report.worker_id)


async def put_workers(pool: asyncpg.Pool, reports: Sequence[WorkerReport]) -> dict[str, str]:
    """Writes reports of different workers; returns the other pools for which workers of their names report."""
    shown = {"pool", "slots", "available_slots", "active_tasks", "tool_pools", "interval"}
    rows = [(one.worker_id, one.status, legible(one.model_dump(include=shown)), legible(one.meta)) for one in reports]
    columns = map(list, zip(*rows, strict=True))
    records = await pool.fetch(queries.PUT_WORKERS, *columns, float(MISSED_REPORTS))
    return {row["worker_id"]: row["pool"] for row in records}


async def publish_report(client: NatsClient, report: WorkerReport) -> None:
    """Sends a report to every listener."""
    subject = client.names.capacity_of(report.pool, report.worker_id)
    await client.publish(subject, report.model_dump_json().encode())


async def announce_commands(
    client: NatsClient, commands: int, pool: str = DEFAULT_POOL, targets: Collection[str] = ()
) -> None:
    """Notifies workers of a pool that so many commands wait: the targets, or all if there are none.

    A message that is lost only delays: the dispatcher repeats it while commands wait.
    """
    subjects = [client.names.targeted(pool, name) for name in targets] or [client.names.broadcast(pool)]
    with contextlib.suppress(nats.errors.Error, OSError):
        for subject in subjects:
            await client.publish(subject, orjson.dumps({"commands": commands}))
