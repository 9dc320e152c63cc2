"""The open connections of a dispatcher: commands go to the pool of workers, and their ends come back.

Only the queue row counts; a message over NATS merely notifies workers of waiting commands. Those with known capacity
are notified first, by their own subjects, and any worker of the pool may claim: each row is claimed once. If a message
is lost or its worker has gone, the sweep repeats it to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from noetl_dagster.engine.pool.ends import CommandEnds
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.capacity import CapacityListener, announce_commands
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsClient
from noetl_dagster.playbook.models import StepSpec
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import EventTransport
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.context import CommandContext, Shared

logger = logging.getLogger(__name__)

SLICE = 500
"""Commands put into the queue in one round trip."""

SWEEP_SECONDS = 5.0
"""Longest interval at which claims are checked; ends never wait for it."""

PATIENCE = RetryLimits(DATABASE_AWAY)


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """An issued command for a worker to run."""

    command: Command
    shared: Shared
    context: dict[str, Any]
    tool_kind: str
    pool: str
    spec: StepSpec
    done: asyncio.Future[Outcome]


class Link:
    """NATS, the listening connection, and the tasks that queue commands and requeue those of lost workers."""

    def __init__(self, runtime: Runtime, client: NatsClient) -> None:
        settings = runtime.settings
        assert settings.db_url is not None
        self._runtime = runtime
        self._client = client
        self._capacity = CapacityListener(client)
        self._handler = EventHandler(runtime.log, settings.command_heartbeat_timeout_seconds)
        self._requests: asyncio.Queue[DispatchRequest] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ingestor: Ingestor | None = None
        self._ingesting: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._pools: dict[tuple[int, str], str] = {}  # by execution and step
        self._unattended: set[str] = set()
        self.ends = CommandEnds(runtime.pool, settings.db_url)

    async def open(self) -> None:
        """Subscribes to capacity reports, listens for ends, and starts the tasks."""
        await self._capacity.open()
        await self.ends.open()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send()), loop.create_task(self._sweep())]
        if self._runtime.settings.event_transport is EventTransport.NATS:
            self._ingestor = Ingestor(self._client, self._handler)
            await self._ingestor.open()
            self._ingesting = loop.create_task(self._ingestor.run(self._stop))

    async def close(self) -> None:
        """Stops the tasks, commits events that were already fetched, and closes the connections."""
        self._stop.set()
        await cancel_and_wait(*self._tasks)
        if self._ingesting is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ingesting
        if self._ingestor is not None:
            await self._ingestor.close()
        await self.ends.close()
        await self._capacity.close()
        await self._client.close()

    def submit(self, request: DispatchRequest) -> None:
        """Hands over a command for the queue."""
        self._pools[request.command.execution_id, request.command.step] = request.pool
        self._requests.put_nowait(request)

    def unattended(self, execution_id: int, step: str) -> str | None:
        """Returns a message if commands of a step wait for a pool that is known to have no worker, else None."""
        pool = self._pools.get((execution_id, step))
        return queries.no_worker(pool) if pool in self._unattended else None

    async def _send(self) -> None:
        """Puts requests into the queue, as many at once as there are, and announces them."""
        while True:
            batch = [await self._requests.get()]
            while len(batch) < SLICE and not self._requests.empty():
                batch.append(self._requests.get_nowait())
            batch = [request for request in batch if not request.done.done()]
            if not batch:
                continue
            try:
                await with_retries(partial(self._enqueue, batch), PATIENCE, on_failure=self._note_delay)
            except Exception as error:
                for request in batch:
                    if not request.done.done():
                        request.done.set_exception(error)

    @staticmethod
    def _note_delay(error: BaseException, pause: float) -> None:
        logger.warning("commands cannot be queued: %s; trying again in %.2g s", error, pause)

    async def _enqueue(self, batch: list[DispatchRequest]) -> None:
        await self._runtime.buffer.flush()  # command.issued comes first
        shares: dict[Shared, int] = {}
        rows = [
            (
                request.command.execution_id,
                request.command.command_id,
                request.command.step,
                request.tool_kind,
                request.spec.max_attempts,
                request.context,
                shares.setdefault(request.shared, len(shares) + 1),
                request.spec.priority,
                request.spec.weight,
                request.pool,
            )
            for request in batch
        ]
        *columns, priorities, weights, pools = map(list, zip(*rows, strict=True))
        shared = [share.context() for share in shares]
        queued = await self._runtime.pool.fetch(queries.ENQUEUE, *columns, shared, priorities, weights, pools)
        names = {row["command_id"] for row in queued}
        # the others have ended, or an earlier run has queued them
        self.ends.check({request.command.command_id for request in batch} - names)
        by_pool = attrgetter("pool")
        for pool, requests in groupby(sorted(batch, key=by_pool), by_pool):
            kinds = [request.tool_kind for request in requests]
            targets = self._capacity.registry.targets(len(kinds), set(kinds), pool)
            await announce_commands(self._client, len(kinds), pool, targets)

    async def _sweep(self) -> None:
        interval = min(SWEEP_SECONDS, self._runtime.settings.worker_heartbeat_seconds)
        while True:
            await asyncio.sleep(interval)
            if not self._client.is_connected:
                self._capacity.registry.excuse()
            executions = self.ends.executions
            self._forget_others(set(executions))
            if not executions:
                continue
            try:
                await self._requeue(executions)
            except DATABASE_AWAY as error:
                logger.warning("cannot check the commands of workers now: %r", error)
            except Exception:  # a defect must not end the sweep
                logger.exception("cannot check the commands of workers now")

    def _forget_others(self, executions: set[int]) -> None:
        """Forgets the pools of executions that wait for nothing any more."""
        self._pools = {key: pool for key, pool in self._pools.items() if key[0] in executions}
        self._unattended &= set(self._pools.values())

    async def _requeue(self, executions: list[int]) -> None:
        """Offers the commands of lost workers, and those whose announcement was lost, to all workers."""
        registry, pool = self._capacity.registry, self._runtime.pool
        await self._expect_holders(executions)
        released = []
        lives = registry.lives()
        for row in await pool.fetch(
            queries.RELEASE, executions, registry.lost(), list(lives), list(lives.values())
        ):
            if row["attempts"] >= row["max_attempts"]:
                await self._give_up(row)
            else:
                released.append(row["pool"])
        for name in set(self._pools.values()):
            count = released.count(name)
            waits = count > 0 or await pool.fetchval(queries.SOME_WAIT, executions, name)
            if waits:
                await announce_commands(self._client, count, name)
            self._note_workers(name, waits)

    def _note_workers(self, pool: str, waits: bool) -> None:
        """Warns, once, that commands wait for a pool that has no worker."""
        if not waits or not self._client.is_connected or self._capacity.registry.attended(pool):
            self._unattended.discard(pool)
        elif pool not in self._unattended:
            self._unattended.add(pool)
            logger.warning("%s", queries.no_worker(pool))

    async def _expect_holders(self, executions: list[int]) -> None:
        """Adds the workers that hold commands of an earlier process: those that stay silent are lost."""
        settings = self._runtime.settings
        interval = settings.worker_heartbeat_seconds
        silent = settings.command_heartbeat_timeout_seconds - queries.MISSED_REPORTS * interval
        for row in await self._runtime.pool.fetch(queries.HOLDERS, executions, silent):
            self._capacity.registry.expect(row["worker_id"], interval)

    async def _give_up(self, row: Any) -> None:
        """Ends a command that every worker which claimed it has left unfinished."""
        record = await self._runtime.pool.fetchrow(
            queries.QUEUED_COMMAND, row["execution_id"], row["command_id"]
        )
        if record is None:
            return
        context = CommandContext.model_validate(record["context"])
        command = context.command(row["execution_id"], None)
        error = ToolError(
            f"step {command.step}: {row['attempts']} workers in turn claimed the command and were gone before "
            "it ended; look at their logs and memory, or raise spec.max_attempts",
            kind="worker",
            code="WORKERS_LOST",
        )
        event = self._runtime.commands.ended(command, Outcome(error_envelope(error)), final=context.final)
        await self._handler.handle_events([event])
