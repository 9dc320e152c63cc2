"""What a dispatcher holds open: commands to the pool of workers, and their ends back (seed P4.3).

The queue row is what counts; messages over NATS only wake workers. So one may be lost, come twice or go to a
worker that is gone: the row is claimed once, and the sweep wakes again. Workers that claim in batches are told
that something waits; a worker of the other kind gets a notice of each command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import nats.errors
import nats.js.errors
import orjson
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext

from noetl_dagster.engine.pool.ends import CommandEnds
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.attendance import MISSED_REPORTS, no_worker
from noetl_dagster.events.transport.capacity import CapacityListener, wake_all
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.intake import EventIntake
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.nats.streams import ensure_streams
from noetl_dagster.events.transport.nats.transport import MESSAGE_ID
from noetl_dagster.playbook.models import StepSpec
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.process.tracing import trace
from noetl_dagster.settings import DEFAULT_POOL, EventTransport
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.context import CommandContext, Shared

logger = logging.getLogger(__name__)

SLICE = 500
"""Commands put into the queue in one round trip."""

ACQUAINTANCE_SECONDS = 0.05
"""Workers answer the call for reports well within this time. While none is known, each command has a notice."""

CONFIRM_SECONDS = 5.0
SWEEP_SECONDS = 5.0
"""Longest interval at which claims and notices are looked after; ends never wait for it."""

PATIENCE = RetryLimits(DATABASE_AWAY)


@dataclass(frozen=True, slots=True)
class Request:
    """An issued command that a worker is to run."""

    command: Command
    shared: Shared
    context: dict[str, Any]
    tool_kind: str
    pool: str
    spec: StepSpec
    done: asyncio.Future[Outcome]


class Link:
    """What a dispatcher holds open: NATS, the listening connection, the tasks that look after commands."""

    def __init__(self, runtime: Runtime, client: NatsClient) -> None:
        settings = runtime.settings
        assert settings.db_url is not None
        self._runtime = runtime
        self._client = client
        self._names = Names.of(settings)
        self._stream: JetStreamContext = client.jetstream(publish_async_max_pending=4_000)
        self._capacity = CapacityListener(client, settings)
        self._intake = EventIntake(runtime.log, settings.command_heartbeat_timeout_seconds)
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ingestor: Ingestor | None = None
        self._ingesting: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._notifying = asyncio.Lock()
        self._purged: set[str] = set()
        self._pools: dict[tuple[int, str], str] = {}  # by execution and step
        self._unattended: set[str] = set()
        self._edition = str(runtime.ids.next())  # another process's notices are no duplicates of ours
        self.ends = CommandEnds(runtime.pool, settings.db_url)

    async def open(self) -> None:
        settings = self._runtime.settings
        await ensure_streams(self._stream, settings)
        await self._capacity.open()
        await self._capacity.first_report(ACQUAINTANCE_SECONDS)
        await self.ends.open()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send()), loop.create_task(self._sweep())]
        if settings.event_transport is EventTransport.NATS:
            self._ingestor = Ingestor(self._client, self._intake, settings)
            await self._ingestor.open()
            self._ingesting = loop.create_task(self._ingestor.run(self._stop))

    async def close(self) -> None:
        self._stop.set()
        await cancel_and_wait(*self._tasks)
        if self._ingesting is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ingesting  # what it has taken it commits
        if self._ingestor is not None:
            await self._ingestor.close()
        await self.ends.close()
        await self._capacity.close()
        await self._client.close()

    def submit(self, request: Request) -> None:
        self._pools[request.command.execution_id, request.command.step] = request.pool
        self._requests.put_nowait(request)

    def unattended(self, execution_id: int, step: str) -> str | None:
        """What to say of a step whose commands wait for a pool that has no worker, as far as one knows."""
        pool = self._pools.get((execution_id, step))
        return no_worker(pool) if pool in self._unattended else None

    async def _send(self) -> None:
        """Puts requests into the queue, as many at once as there are, and sends their notices."""
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

    async def _enqueue(self, batch: list[Request]) -> None:
        await self._runtime.buffer.flush()  # command.issued comes first
        single = self._capacity.registry.some_single()
        targets = {
            request.command.command_id: self._target(request.tool_kind)
            if single and request.pool == DEFAULT_POOL
            else None
            for request in batch
        }
        shares: dict[Shared, int] = {}
        rows = [
            (
                request.command.execution_id,
                request.command.command_id,
                request.command.step,
                request.tool_kind,
                request.spec.max_attempts,
                request.context,
                targets[request.command.command_id],
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
        events = {row["command_id"]: row["event_id"] for row in queued}
        self.ends.check(name for name in targets if name not in events)  # ended, or queued by an earlier run
        for pool, mine in groupby(sorted(batch, key=_pool_of), _pool_of):
            kinds = [request.tool_kind for request in mine]
            await self._wake(len(kinds), set(kinds), pool)
        if single:
            await self._notify(
                [
                    (command.execution_id, command.command_id, events.get(command.command_id, 0), kind,
                     targets[command.command_id], self._edition)
                    for command, kind in ((one.command, one.tool_kind) for one in batch if one.pool == DEFAULT_POOL)
                ]
            )  # fmt: skip

    def _target(self, tool_kind: str) -> str | None:
        """The worker that a notice of a command goes to, where it is one that needs notices."""
        registry = self._capacity.registry
        picked = registry.pick(tool_kind)
        return None if picked is None or registry.workers[picked].report.batch else picked

    async def _wake(self, commands: int, kinds: set[str], pool: str) -> None:
        """Tells workers of a pool that commands wait: some of those that have room, or all of them."""
        told = self._capacity.registry.to_wake(commands, kinds, pool)
        subjects = [self._names.wake_of(name) for name in told] or [self._names.wake_all(pool)]
        with contextlib.suppress(nats.errors.Error, OSError):  # the sweep wakes again
            for subject in subjects:
                await self._client.publish(subject, orjson.dumps({"commands": commands}))

    async def _notify(self, commands: Sequence[tuple[int, str, int, str, str | None, str]]) -> None:
        """Sends a notice for each command; one that NATS does not take now is left to the sweep."""
        async with self._notifying:
            await self._publish(commands)

    async def _publish(self, commands: Sequence[tuple[int, str, int, str, str | None, str]]) -> None:
        futures = []
        try:
            for execution_id, command_id, event_id, kind, target, edition in commands:
                notice = {
                    "execution_id": str(execution_id),
                    "event_id": str(event_id),
                    "command_id": command_id,
                    "tool_kind": kind,
                    "server_url": self._runtime.settings.server_url,
                }
                subject = self._names.commands if target is None else self._names.targeted(target)
                headers = {
                    MESSAGE_ID: f"{command_id}/{edition}",
                    **trace.headers_about(execution_id, command_id),
                }
                futures.append(
                    await self._stream.publish_async(
                        subject, orjson.dumps(notice), wait_stall=CONFIRM_SECONDS, headers=headers
                    )
                )
        except (nats.errors.Error, OSError) as error:
            logger.warning("notices of commands are late: %r", error)
        if futures:
            await asyncio.wait(futures, timeout=CONFIRM_SECONDS)
            for future in futures:
                if not future.done():
                    future.cancel()
                elif future.exception() is not None:
                    logger.debug("a notice was not taken: %r", future.exception())

    async def _sweep(self) -> None:
        interval = min(SWEEP_SECONDS, self._runtime.settings.worker_heartbeat_seconds)
        count = 0
        while True:
            await asyncio.sleep(interval)
            count += 1
            if not self._client.is_connected:
                self._capacity.registry.excuse()
            executions = self.ends.executions
            self._forget_others(set(executions))
            if not executions:
                continue
            try:
                await self._requeue(executions, edition=f"{self._edition}-{count}")
                await self._purge(set(self._capacity.registry.lost()))
            except (*DATABASE_AWAY, nats.errors.Error) as error:
                logger.warning("cannot look after commands just now: %r", error)
            except Exception:  # a defect must not leave the commands without anybody who looks after them
                logger.exception("cannot look after commands just now")

    def _forget_others(self, executions: set[int]) -> None:
        """Pools that only executions had which wait for nothing any more are nobody's."""
        self._pools = {key: pool for key, pool in self._pools.items() if key[0] in executions}
        self._unattended &= set(self._pools.values())

    async def _requeue(self, executions: list[int], edition: str) -> None:
        """Commands of workers that are gone, and of notices that were lost, go to anybody."""
        registry, pool = self._capacity.registry, self._runtime.pool
        await self._expect_holders(executions)
        anew = []
        lives = registry.lives()
        for row in await pool.fetch(
            queries.RELEASE, executions, registry.lost(), list(lives), list(lives.values())
        ):
            if row["attempts"] >= row["max_attempts"]:
                await self._give_up(row)
            else:
                anew.append(row)
        absent = registry.absent()
        if absent:
            anew += await pool.fetch(queries.UNTARGET, executions, absent)
        for name in set(self._pools.values()):
            mine = [row for row in anew if row["pool"] == name]
            waits = bool(mine) or await pool.fetchval(queries.SOME_WAIT, executions, name)
            if waits and registry.some_batch(name):
                await wake_all(self._client, self._runtime.settings, len(mine), name)
            self._note_workers(name, waits)
        if not registry.some_single():
            return
        if await self._no_notices():  # whatever waits in the queue has lost its notice
            anew = await pool.fetch(queries.WAITING, executions, DEFAULT_POOL)
        anew = [row for row in anew if row["pool"] == DEFAULT_POOL]
        if anew:
            logger.info("%d commands are offered to all workers again", len(anew))
            await self._notify(
                [
                    (row["execution_id"], row["command_id"], row["event_id"], row["tool_kind"], None, edition)
                    for row in anew
                ]
            )

    def _note_workers(self, pool: str, waits: bool) -> None:
        """Warns, once, that commands wait for a pool that has no worker."""
        if not waits or not self._client.is_connected or self._capacity.registry.attended(pool):
            self._unattended.discard(pool)
        elif pool not in self._unattended:
            self._unattended.add(pool)
            logger.warning("%s", no_worker(pool))

    async def _purge(self, lost: set[str]) -> None:
        """Takes the notices of workers that are gone off the stream, once each time that one goes."""
        self._purged &= lost
        for worker_id in lost - self._purged:
            subject = self._names.targeted(worker_id)
            await self._stream._jsm.purge_stream(self._names.command_stream, subject=subject)
            self._purged.add(worker_id)

    async def _expect_holders(self, executions: list[int]) -> None:
        """Knows the workers that an earlier process left commands to: those that stay silent are gone."""
        settings = self._runtime.settings
        interval = settings.worker_heartbeat_seconds
        silent = settings.command_heartbeat_timeout_seconds - MISSED_REPORTS * interval
        for row in await self._runtime.pool.fetch(queries.HOLDERS, executions, silent):
            self._capacity.registry.expect(row["worker_id"], interval)

    async def _no_notices(self) -> bool:
        """Whether the stream of commands is empty; one that was deleted is made anew."""
        try:
            return not (await self._stream.stream_info(self._names.command_stream)).state.messages
        except nats.js.errors.NotFoundError:
            await ensure_streams(self._stream, self._runtime.settings)
            return True

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
        await self._intake.handle_events([event])


def _pool_of(request: Request) -> str:
    return request.pool
