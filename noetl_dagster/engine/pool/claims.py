"""Claims of queued commands, in short transactions that claims of many workers share."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import asyncpg
from pydantic import ValidationError

from noetl_dagster.errors import ExecutionStateError, first_invalid
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.base import BatchPause
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.values import encode_json
from noetl_dagster.worker.context import MOST_AT_ONCE, CommandContext, Grant

MOST_STATES = 64
"""States of executions that are kept."""

Observe = Callable[[str, str, Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Commands of one step that a worker claimed, the seconds that each waited, and their ``ClaimedGroup``."""

    worker_id: str
    execution_id: int
    step: str
    tool_kind: str
    waited: Sequence[float]
    state_version: str
    answer: str


@dataclass(frozen=True, slots=True)
class _ClaimRequest:
    """A worker's claim that waits for its statement."""

    worker_id: str
    event_ids: Sequence[int]
    done: asyncio.Future[list[ClaimRow]]


@dataclass(slots=True)
class _ClaimQueue:
    """The claims of a pool that wait, the task that takes them, and those that make them."""

    waiting: deque[_ClaimRequest] = field(default_factory=deque)
    pace: BatchPause = field(default_factory=BatchPause)
    taking: asyncio.Task[None] | None = None
    claiming: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self) -> list[_ClaimRequest]:
        """Removes and returns the next claims for one statement: one of each worker, without an id twice."""
        batch, later, workers, ids = [], deque[_ClaimRequest](), set[str](), set[int]()
        for request in self.waiting:
            full = ids and len(ids) + len(request.event_ids) > MOST_AT_ONCE
            if full or request.worker_id in workers or not ids.isdisjoint(request.event_ids):
                later.append(request)
            elif not request.done.done():
                batch.append(request)
            workers.add(request.worker_id)  # its claims stay in order
            ids.update(request.event_ids)
        self.waiting = later
        return batch


class Claims:
    """Hands out queued commands for ``lease_seconds``; ``observe`` gets the seconds that those of a step waited.

    Claims of many workers of a pool that arrive together share a statement, and with it a commit.
    """

    def __init__(self, pool: asyncpg.Pool, lease_seconds: float, observe: Observe | None = None) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._observe = observe
        self._queues: defaultdict[str, _ClaimQueue] = defaultdict(_ClaimQueue)

    async def claim(
        self,
        worker_id: str,
        event_ids: Sequence[int],
        limits: Mapping[str, int] | None = None,
        pool: str = DEFAULT_POOL,
        *,
        only: Sequence[str] | None = None,
    ) -> list[ClaimRow]:
        """Claims as many commands of a pool as there are ``event_ids``, or fewer if fewer wait.

        Args:
            event_ids: ids of the ``command.claimed`` events, created by the worker: claiming again with the same
                ids returns the same answer.
            limits: maximum of commands by tool kind, for kinds with fewer slots than there are ids.
            only: ids of the only commands to claim; limits do not apply to them.
        """
        if limits or only is not None:
            return await self._claim([worker_id] * len(event_ids), event_ids, pool, limits, only)
        queue, done = self._queues[pool], asyncio.get_running_loop().create_future()
        queue.waiting.append(_ClaimRequest(worker_id, event_ids, done))
        queue.pace.note(worker_id)
        if queue.taking is None or queue.taking.done():
            queue.taking = asyncio.create_task(self._serve(pool, queue))
        claimed: list[ClaimRow] = await done
        return claimed

    async def _serve(self, pool: str, queue: _ClaimQueue) -> None:
        """Begins the claims that wait, those of many workers in one statement, until none waits."""
        while queue.waiting:
            await asyncio.sleep(queue.pace.pause)
            queue.pace.begin()
            if batch := queue.take():
                claiming = asyncio.create_task(self._claim_together(pool, batch))
                queue.claiming.add(claiming)
                claiming.add_done_callback(queue.claiming.discard)

    async def _claim_together(self, pool: str, batch: Sequence[_ClaimRequest]) -> None:
        """Claims for the workers of a batch; if the statement fails because of one of them, for each alone."""
        workers = [one.worker_id for one in batch for _ in one.event_ids]
        ids = [event_id for one in batch for event_id in one.event_ids]
        try:
            claimed = await self._claim(workers, ids, pool)
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DATABASE_AWAY):
                for request in batch:
                    await self._claim_together(pool, [request])
                return
            for request in batch:
                if not request.done.done():
                    request.done.set_exception(error)
            return
        rows: dict[str, list[ClaimRow]] = {}
        for row in claimed:
            rows.setdefault(row.worker_id, []).append(row)
        for request in batch:
            if not request.done.done():
                request.done.set_result(rows.get(request.worker_id, []))

    async def _claim(
        self,
        workers: Sequence[str],
        event_ids: Sequence[int],
        pool: str,
        limits: Mapping[str, int] | None = None,
        only: Sequence[str] | None = None,
    ) -> list[ClaimRow]:
        executions = None if only is None else list(map(execution_of, only))
        own = (workers, event_ids, self._lease_seconds, dict(limits or {}))
        records = await self._pool.fetch(queries.CLAIM, *own, pool, executions, only)
        claimed = [ClaimRow(*record) for record in records]
        if self._observe is not None:
            for one in claimed:
                self._observe(one.step, one.tool_kind, one.waited)
        return claimed

    def answer(self, claimed: Sequence[ClaimRow], states: Mapping[int, bytes] | None = None) -> bytes:
        """Returns a ``Batch`` as JSON; PostgreSQL has written its groups. ``states`` are new to the worker."""
        groups = ",".join(one.answer for one in claimed)
        encoded = b",".join(b'"%d":%b' % (execution_id, state) for execution_id, state in (states or {}).items())
        head = f'{{"lease_seconds":{self._lease_seconds},"groups":[{groups}],"states":{{'
        return head.encode() + encoded + b"}}"

    async def release(self, worker_id: str, event_ids: Sequence[int], pool: str = DEFAULT_POOL) -> int:
        """Returns claims that were not begun to the queue, by their ``event_ids``; returns how many commands it has."""
        return len(await self._pool.fetch(queries.GIVE_BACK, worker_id, event_ids, pool))

    async def queued(self, name: str) -> Grant | None:
        """Returns a command that waits or runs, by its id or that of its ``command.issued`` event; claims nothing.

        Raises:
            ExecutionStateError: the row of the queue is malformed.
        """
        number = execution_of(name)
        if ":" in name:
            record = await self._pool.fetchrow(queries.QUEUED_COMMAND, number, name)
        else:
            record = await self._pool.fetchrow(queries.QUEUED_EVENT, number)
        if record is None:
            return None
        shown = {key: record[key] for key in ("execution_id", "command_id", "event_id", "state_version")}
        try:
            context = CommandContext.model_validate(record["context"])
        except ValidationError as error:
            raise ExecutionStateError(
                f"the row of command {record['command_id']} in noetl.queue is malformed: "
                f"{first_invalid(error, 'context')}; cancel execution {record['execution_id']}, and start it again"
            ) from None
        return Grant(**shown, claim=record["attempts"], lease_seconds=self._lease_seconds, context=context)


class States:
    """The states of executions for the answers to claims, as JSON: read once for each version, whoever asks."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._read: OrderedDict[tuple[int, str], asyncio.Task[bytes]] = OrderedDict()

    async def of(self, execution_id: int, version: str) -> bytes:
        """Returns the events of an execution's state, in a version or a later one."""
        key = execution_id, version
        reading = self._read.get(key)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._read[key] = asyncio.create_task(self._encoded(execution_id))
        self._read.move_to_end(key)
        while len(self._read) > MOST_STATES:
            self._read.popitem(last=False)
        return await asyncio.shield(reading)

    async def _encoded(self, execution_id: int) -> bytes:
        return encode_json(list(map(message_of, await self._log.lifecycle(execution_id))))


def execution_of(name: str) -> int:
    """Returns the number that a command id begins with, the id of its execution; -1 if it begins with none."""
    number = name.partition(":")[0]
    return int(number) if number.isascii() and number.isdecimal() and int(number) < 2**63 else -1
