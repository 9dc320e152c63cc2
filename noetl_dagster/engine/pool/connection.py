"""The open connections of a dispatcher: commands go to the pool of workers, and their ends come back.

Only the queue row counts; a message over NATS merely notifies workers of waiting commands. Those with known capacity
are notified first, by their own subjects, and any worker of the pool may claim: each row is claimed once. If a message
is lost or its worker has gone, the sweep repeats it to all. If a row is gone, the sweep queues the command again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.pool.ends import PATIENCE, CommandEnds
from noetl_dagster.engine.pool.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY, DATABASE_ERRORS
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.capacity import CapacityListener, announce_commands
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsClient
from noetl_dagster.events.types import EventType
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.settings import EventTransport
from noetl_dagster.values import encode_json
from noetl_dagster.worker.command import CURRENT_ITEM_BYTES, Outcome
from noetl_dagster.worker.context import Shared, own_context
from noetl_dagster.worker.execution import Visit
from noetl_dagster.worker.runner import Call

logger = logging.getLogger(__name__)

SLICE = 500
"""Commands put into the queue in one round trip."""

SWEEP_SECONDS = 5.0
"""Longest interval at which claims are checked; ends never wait for it."""

BROADCAST_SECONDS, MOST_SECONDS = 0.0005, 0.1
"""Pause between two notices to all workers of a pool: for each worker, and at most."""

_FAILED = Outcome({"status": "error"})


@dataclass(frozen=True, slots=True)
class _QueuedCommand:
    """An issued command for a worker to run, with its own context, as it is queued."""

    call: Call
    context: dict[str, Any]
    done: asyncio.Future[Outcome]


class PoolConnection:
    """NATS, the ends of commands, and the tasks that queue commands and requeue those of lost workers."""

    def __init__(self, runtime: Runtime, liveness: Liveness, client: NatsClient) -> None:
        self._runtime = runtime
        self._client = client
        self._capacity = CapacityListener(client)
        self._requests: asyncio.Queue[_QueuedCommand] = asyncio.Queue()
        self._queued: dict[str, _QueuedCommand] = {}  # by command, until its end
        self._tasks: list[asyncio.Task[None]] = []
        self._ingestor: Ingestor | None = None
        self._ingesting: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._pools: dict[tuple[int, str], str] = {}  # by execution and step
        self._unattended: set[str] = set()
        self._unannounced: dict[str, list[str]] = {}  # tool kinds of commands, by pool
        self._notices: dict[str, asyncio.Task[None]] = {}  # by pool
        self._ends = CommandEnds(runtime.pool, liveness)
        self._reaper = Reaper(runtime.pool, runtime.handler, runtime.commands)

    async def open(self) -> None:
        """Subscribes to capacity reports, listens for ends, and starts the tasks."""
        await self._capacity.open()
        await self._ends.open()
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._sweep())]
        if self._runtime.settings.event_transport is EventTransport.NATS:
            self._ingestor = Ingestor(self._client, self._runtime.handler)
            await self._ingestor.open()
            self._ingesting = asyncio.create_task(self._ingestor.run(self._stop))

    async def close(self) -> None:
        """Stops the tasks, commits events that were already fetched, and closes the connections."""
        self._stop.set()
        await cancel_and_wait(*self._tasks, *self._notices.values())
        if self._ingesting is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ingesting
        if self._ingestor is not None:
            await self._ingestor.close()
        await self._ends.close()
        await self._capacity.close()
        await self._client.close()

    async def run(self, call: Call) -> Outcome:
        """Queues a command and waits for its end; see :meth:`Dispatcher.run`."""
        execution_id, step, _ = call.visit.key
        context = await self._own_context(call)
        done = self._ends.expect(execution_id, call.command.command_id)
        done.add_done_callback(lambda _: self._queued.pop(call.command.command_id, None))
        self._pools[execution_id, step] = call.visit.program.step.worker_pool
        self._requests.put_nowait(_QueuedCommand(call, context, done))
        try:
            outcome = await done
        except asyncio.CancelledError:
            with contextlib.suppress(*DATABASE_ERRORS):
                await self._runtime.pool.execute(queries.WITHDRAW, execution_id, call.command.command_id)
            raise
        if call.values is not None:
            call.values.update(outcome.values)
        return outcome

    async def _own_context(self, call: Call) -> dict[str, Any]:
        command, loop, item = call.command, call.visit.program.step.loop, call.command.item
        more: dict[str, Any] = {}
        if call.values:
            more["values"] = call.values
        if loop is not None and loop.is_sequential:
            # the log has the values that earlier iterations set only when all are done
            more["ctx"] = call.visit.execution.state.ctx
        if isinstance(item, (int, float)) or (item is not None and len(encode_json(item)) <= CURRENT_ITEM_BYTES):
            more["item"] = item
        elif item is not None:
            name = f"item-{command.loop_id}-{command.index}"
            ref = await self._runtime.results.put(item, execution_id=command.execution_id, step=command.step, name=name)
            more["item_ref"] = ref.model_dump(mode="json")
        return own_context(command, **more)

    def unattended(self, execution_id: int, step: str) -> str | None:
        """Returns a message if commands of a step wait for a pool that is known to have no worker, else None."""
        pool = self._pools.get((execution_id, step))
        return queries.no_worker(pool) if pool in self._unattended else None

    async def _send(self) -> None:
        """Puts requests into the queue, as many at once as there are, and announces them."""
        while True:
            batch = [await self._requests.get()]
            await asyncio.sleep(self._pause(batch[0].call.visit.program.step.worker_pool) / 2)
            while len(batch) < SLICE and not self._requests.empty():
                batch.append(self._requests.get_nowait())
            batch = [request for request in batch if not request.done.done()]
            if not batch:
                continue
            try:
                await with_retries(partial(self._enqueue, batch), PATIENCE, on_failure=_note_delay)
            except Exception as error:
                for request in batch:
                    if not request.done.done():
                        request.done.set_exception(error)
            self._queued |= {one.call.command.command_id: one for one in batch if not one.done.done()}

    def _pause(self, pool: str) -> float:
        """Returns for how long commands wait for others: 0 unless no worker of the pool is known to have capacity."""
        notice = self._notices.get(pool)
        if notice is None or notice.done():
            return 0.0
        return min(BROADCAST_SECONDS * self._capacity.registry.attending(pool), MOST_SECONDS)

    async def _enqueue(self, batch: list[_QueuedCommand]) -> set[str]:
        """Puts requests into the queue, and announces them; returns the commands that are new there."""
        await self._runtime.buffer.flush()  # command.issued comes first
        shares: dict[tuple[int, Shared], int] = {}
        kinds: dict[str, list[str]] = {}
        own, common = [], []
        for request in batch:
            command, program = request.call.command, request.call.visit.program
            shared = Shared.of(command, final=request.call.is_final(_FAILED))
            key = command.execution_id, shared
            if key not in shares:
                shares[key] = len(shares) + 1
                step, spec = program.step, program.step.spec
                limits = spec.max_attempts, spec.priority, spec.weight
                common.append((key[0], step.name, program.kind, *limits, step.worker_pool, shared.context()))
            own.append((command.command_id, request.context, shares[key]))
            kinds.setdefault(common[shares[key] - 1][-2], []).append(program.kind)
        queued = await self._runtime.pool.fetch(queries.ENQUEUE, *_columns(own, 3), *_columns(common, 8))
        names = {row["command_id"] for row in queued}
        # the others have ended, or an earlier run has queued them
        self._ends.check({request.call.command.command_id for request in batch} - names)
        for pool, waiting in kinds.items():
            self._announce(pool, waiting)
        return names

    def _announce(self, pool: str, kinds: Sequence[str]) -> None:
        """Notifies workers with capacity of waiting commands; if there are none, all of the pool, not too often.

        Workers without capacity claim as soon as they have some, and report what they have left.
        """
        self._unannounced.setdefault(pool, []).extend(kinds)
        if pool not in self._notices or self._notices[pool].done():
            self._notices[pool] = asyncio.create_task(self._notify(pool))

    async def _notify(self, pool: str) -> None:
        while kinds := self._unannounced.pop(pool, None):
            targets = self._capacity.registry.targets(len(kinds), set(kinds), pool)
            await announce_commands(self._client, len(kinds), pool, targets)
            if not targets:
                await asyncio.sleep(self._pause(pool))

    async def _sweep(self) -> None:
        interval = min(SWEEP_SECONDS, self._runtime.settings.worker_heartbeat_seconds)
        while True:
            await asyncio.sleep(interval)
            if not self._client.is_connected:
                self._capacity.registry.excuse()
            executions = set(self._ends.executions)
            # the pools of executions that wait for nothing any more are forgotten
            self._pools = {key: pool for key, pool in self._pools.items() if key[0] in executions}
            self._unattended &= set(self._pools.values())
            if not executions:
                continue
            try:
                await self._replace_rows()
                await self._requeue(list(executions))
            except DATABASE_AWAY as error:
                logger.warning("cannot check the commands of workers now: %r", error)
            except Exception:  # a defect must not end the sweep
                logger.exception("cannot check the commands of workers now")

    async def _replace_rows(self) -> None:
        """Queues commands again that have not ended although their rows are gone: somebody has deleted these.

        A row that leaves with the end of its command is there until the end is in the log, so it is not replaced. The
        claim of a deleted row is gone with it: no event of its worker counts any more, so that its chunks have no gap.
        """
        held = {name: request.call.command.execution_id for name, request in self._queued.items()}
        gone = await self._runtime.pool.fetch(queries.WITHOUT_ROW, list(held.values()), list(held))
        lost = [request for row in gone if (request := self._queued.get(row["command_id"])) is not None]
        for start in range(0, len(lost), SLICE):
            batch = lost[start : start + SLICE]
            new = await self._enqueue(batch)
            visits = [one.call.visit for one in batch if one.call.command.command_id in new]
            for key, count in Counter(visit.key for visit in visits).items():
                await self._warn(next(visit for visit in visits if visit.key == key), count)

    async def _warn(self, visit: Visit, count: int) -> None:
        """Records that commands of a visit have been queued again."""
        state = visit.execution.state
        message = (
            f"step {visit.step}: noetl.queue lost the rows of {count} commands that have not ended; they are queued "
            "again, and those that a worker had begun run a second time; find out who deletes rows of noetl.queue"
        )
        logger.warning("execution %s: %s", state.execution_id, message)
        meta = {"visit": visit.number, "epoch": state.epoch}
        event = self._runtime.event(state, EventType.WARNING, visit.step, "step", "WARNING", meta)
        event.error = message
        await self._runtime.buffer.post([event])

    async def _requeue(self, executions: list[int]) -> None:
        """Offers the commands of lost workers, and those whose announcement was lost, to all workers."""
        registry, pool, settings = self._capacity.registry, self._runtime.pool, self._runtime.settings
        interval = settings.worker_heartbeat_seconds
        silent = settings.command_heartbeat_timeout_seconds - queries.MISSED_REPORTS * interval
        for row in await pool.fetch(queries.HOLDERS, executions, silent):
            # workers that hold commands of an earlier process are lost if they stay silent
            registry.expect(row["worker_id"], interval, row["pool"])
        lost = (*_columns(registry.lost(), 2), *_columns(registry.lives(), 3))
        await pool.execute(queries.EXPIRE_LOST, executions, *lost)
        requeued, _ = await self._reaper.reclaim(executions)
        counts = Counter(one.pool for one in requeued)
        for name in set(self._pools.values()):
            count = counts[name]
            waits = count > 0 or await pool.fetchval(queries.SOME_WAIT, executions, name)
            if waits:
                await announce_commands(self._client, count, name)
            self._note_workers(name, waits)

    def _note_workers(self, pool: str, waits: bool) -> None:
        """Warns, once, that commands wait for a pool that has no worker."""
        if not waits or not self._client.is_connected or self._capacity.registry.attending(pool):
            self._unattended.discard(pool)
        elif pool not in self._unattended:
            self._unattended.add(pool)
            logger.warning("%s", queries.no_worker(pool))


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [[row[place] for row in rows] for place in range(width)]


def _note_delay(error: BaseException, pause: float) -> None:
    logger.warning("commands cannot be queued: %s; trying again in %.2g s", error, pause)
