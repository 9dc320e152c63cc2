"""The projection: reads the log in commit order and keeps ``noetl.execution`` up to date.

Each row of the log has the id of the transaction that wrote it. No row can appear below the oldest running transaction,
so a reader that stays below it skips nothing, whatever the order of commits. Rows and checkpoint change in one
transaction: a process that is killed has applied a batch completely or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.connection import DATABASE_AWAY, DATABASE_ERRORS
from noetl_dagster.events.projection_row import Done, ProjectedExecution
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.process.logs import without_fields

logger = logging.getLogger(__name__)

BATCH = 20_000
"""Approximate number of events in one batch: the events of one transaction are never divided."""

TAIL_LIMIT = 5_000
"""Maximum of events after the checkpoint that a reader applies to a row; beyond it, it reads the whole execution."""

PREFETCH = 1_000
"""Events that a replay of some executions holds at a time."""

INTERVAL = 0.5
"""Seconds between two polls of the log while nothing happens."""

BUSY_INTERVAL = 0.1
"""Seconds between two batches while events arrive: a batch costs nine statements, however few its events are."""


class _Batch(NamedTuple):
    """An applied batch: its number of events, of all shards, and whether it reached the oldest running transaction."""

    events: int
    is_last: bool


class Projection:
    """Maintains the projection. Any number may run: one of them at a time works on a shard.

    Attributes:
        active_at: when it last applied a batch, monotonic.
    """

    def __init__(self, pool: asyncpg.Pool, *, batch: int = BATCH) -> None:
        self._pool = pool
        self._batch = batch
        self.active_at = time.monotonic()

    async def catch_up(self, *, patient: bool = False) -> int:
        """Applies every event below the oldest running transaction; returns the number of events read.

        Events that are committed meanwhile are left to the next call. It skips a shard on which another process works,
        or waits for it if it is ``patient``.
        """
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        lock = queries.LOCK_CHECKPOINTS if patient else queries.LOCK_FREE_CHECKPOINTS
        total = 0
        while True:
            async with self._pool.acquire() as connection, connection.transaction():
                taken = await self._apply_batch(connection, lock)
            if taken is None:
                return total
            total += taken.events
            if taken.is_last:
                return total

    async def lag_seconds(self) -> float:
        """Returns the age in seconds of the oldest event that is not in the projection, 0 if all are."""
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        behind: float = await self._pool.fetchval(queries.LAG)
        return max(behind, 0.0)

    async def rebuild(self) -> int:
        """Replays the whole log; returns the number of events.

        Readers see the old rows until the new ones are complete; if it is killed, it has changed nothing.
        """
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        total = 0
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.LOCK_CHECKPOINTS)  # waits for the processes that work on shards
            await connection.execute(queries.RESET_CHECKPOINTS)
            await connection.execute(queries.FORGET)
            while (taken := await self._apply_batch(connection, queries.LOCK_CHECKPOINTS)) is not None:
                total += taken.events
        return total + await self.catch_up(patient=True)

    async def rebuild_some(self, execution_ids: Sequence[int]) -> int:
        """Replays some executions up to their checkpoints; returns the number of their rows."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.LOCK_CHECKPOINTS)  # waits for the processes that work on shards
            await connection.execute(queries.FORGET_SOME, execution_ids)
            rows = [execution async for execution in replayed(connection, execution_ids)]
            await _put(connection, rows)
        return len(rows)

    async def _apply_batch(self, connection: Any, lock: str) -> _Batch | None:
        """Applies one batch to the shards that are furthest behind, within the caller's transaction.

        Shards with the same checkpoint, as they have once they have caught up, are read together. Returns None if
        there are no events.
        """
        free = await connection.fetch(lock)
        positions = sorted({int(row["xact_id"]) for row in free})
        if not positions:
            return None
        start = str(positions[0])
        shards = [row["shard"] for row in free if row["xact_id"] == start]
        window = await connection.fetchrow(queries.WINDOW, start, self._batch)
        ahead = [row["shard"] for row in free if int(row["xact_id"]) > int(window["horizon"])]
        if ahead:
            logger.warning(
                "noetl.projection_checkpoint: shards %s are ahead of this server's transactions, up to %s; their "
                "executions are projected again from the start of the log",
                *(ahead, window["horizon"]),
            )
            await connection.execute(queries.FORGET_SHARDS, ahead)
            await connection.execute(queries.MOVE_CHECKPOINTS, ahead, "0", 0)
            return _Batch(0, is_last=False)
        stop = _stop(window, positions[1:])
        if stop is None:
            return None
        count = int(await connection.fetchval(queries.COUNT, start, stop))
        await self._project(connection, shards, start, stop)
        await connection.execute(queries.MOVE_CHECKPOINTS, shards, stop, count)
        self.active_at = time.monotonic()
        return _Batch(count, is_last=stop == window["horizon"] and len(positions) == 1)

    async def _project(self, connection: Any, shards: list[int], start: str, stop: str) -> None:
        events: dict[int, list[Any]] = defaultdict(list)
        for event in await connection.fetch(queries.EVENTS, start, stop, shards):
            events[event["execution_id"]].append(event)
        done: dict[int, Done] = defaultdict(dict)
        for row in await connection.fetch(queries.DONE, start, stop, shards):
            done[row["execution_id"]][(row["node_name"], row["visit"])] = row["done"]
        ids = sorted(events.keys() | done.keys())
        if not ids:
            return
        stored_rows = {row["execution_id"]: row for row in await connection.fetch(queries.EXECUTIONS, ids)}
        rows = []
        for execution_id in ids:
            row = stored_rows.get(execution_id)
            execution = ProjectedExecution(**row) if row is not None else ProjectedExecution(execution_id)
            execution.apply(events.get(execution_id, ()), done.get(execution_id, {}))
            if execution.created_at is not None:  # not so for late events of an execution that was dropped
                rows.append(execution)
        await _put(connection, rows)


async def _put(connection: Any, rows: Sequence[ProjectedExecution]) -> None:
    columns = [[getattr(row, name) for row in rows] for name in queries.EXECUTION_COLUMNS]
    await connection.execute(queries.PUT_EXECUTIONS, *columns)


async def replayed(connection: Any, execution_ids: Sequence[int]) -> AsyncIterator[ProjectedExecution]:
    """Yields the rows of executions as the log has them below their checkpoints, without the stored rows.

    Args:
        connection: in a transaction with one snapshot, or that has locked the checkpoints.
    """
    below: dict[str, list[int]] = defaultdict(list)
    for row in await connection.fetch(queries.CHECKPOINTS, execution_ids):
        below[row["xact_id"]].append(row["execution_id"])
    for checkpoint, ids in below.items():
        counts: dict[int, Done] = defaultdict(dict)
        for row in await connection.fetch(queries.DONE_BELOW, ids, checkpoint):
            counts[row["execution_id"]][(row["node_name"], row["visit"])] = row["done"]
        execution: ProjectedExecution | None = None
        async for event in connection.cursor(queries.EVENTS_BELOW, ids, checkpoint, prefetch=PREFETCH):
            if execution is None or execution.execution_id != event["execution_id"]:
                if execution is not None:
                    yield execution
                execution = ProjectedExecution(event["execution_id"])
            execution.apply([event], counts[execution.execution_id])
        if execution is not None:
            yield execution


async def differing(connection: Any, execution_ids: Sequence[int]) -> list[int]:
    """Returns which executions have another row than a replay of their events makes.

    The count of an open loop that a resumption has continued is not compared: until the loop ends, it depends on the
    division of the log into batches.

    Args:
        connection: in a transaction with one snapshot.
    """
    stored = {
        row["execution_id"]: ProjectedExecution(**row)
        for row in await connection.fetch(queries.EXECUTIONS, execution_ids)
    }
    differing_ids = []
    async for execution in replayed(connection, execution_ids):
        row, same = stored.pop(execution.execution_id, None), False
        with suppress(AttributeError, KeyError, TypeError):  # the row's state has another shape
            same = row is not None and row.comparable() == execution.comparable()
        if not same:
            differing_ids.append(execution.execution_id)
    return sorted([*differing_ids, *stored])


class BackgroundProjection:
    """Runs the projection during the work of a process, and a little longer.

    Args:
        linger: seconds after the last work; longer while an older transaction still runs.
    """

    def __init__(self, projection: Projection, *, linger: float = 2.0) -> None:
        self._projection = projection
        self._linger = linger
        self._users = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps the projection running at least until the block ends."""
        self._users += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), context=without_fields())
        try:
            yield
        finally:
            self._users -= 1

    async def close(self) -> None:
        """Stops it, and applies the events that are in the log by then."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
        self._task = None
        with suppress(*DATABASE_ERRORS):
            await self._projection.catch_up()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._linger
        behind = False
        while behind or loop.time() < until:
            taken = 0
            try:
                taken = await self._projection.catch_up()
                behind = taken > 0 or await self._projection.lag_seconds() > 0
            except DATABASE_AWAY as error:
                logger.warning("the projection cannot continue now: %s", error)
            except Exception:  # readers apply the events that it has not
                logger.exception("the projection of this process ends")
                return
            await asyncio.sleep(BUSY_INTERVAL if taken else INTERVAL)
            if self._users:
                until = loop.time() + self._linger


async def read_execution(pool: asyncpg.Pool, execution_id: int) -> ProjectedExecution | None:
    """Returns the current row of an execution: the stored one, with the events since its checkpoint applied.

    Returns None if the log has no such execution. It needs no transaction: one statement reads row and checkpoint.
    """
    async with pool.acquire() as connection:
        row = dict(await connection.fetchrow(queries.ROW_AND_CHECKPOINT, execution_id))
        checkpoint = row.pop("checkpoint") or "0"
        has_tail = row.pop("has_tail")
        has_row = row["execution_id"] is not None
        execution = ProjectedExecution(**row) if has_row else ProjectedExecution(execution_id)
        if not has_tail:
            return execution if has_row else None
        tail = await connection.fetch(queries.TAIL, execution_id, checkpoint, TAIL_LIMIT)
        if tail[0]["seen"] >= TAIL_LIMIT:
            return await execution_at(connection, execution_id, 2**63 - 1)
    done: Done = defaultdict(int)
    for event in tail:
        if event["done"]:
            done[(event["node_name"], event["visit"])] += event["done"]
    execution.apply([event for event in tail if event["is_change"]], done)
    return execution if execution.created_at is not None else None


async def execution_at(connection: Any, execution_id: int, event_id: int) -> ProjectedExecution | None:
    """Returns the row of an execution as it was at an event, from the log; None if the log has no such execution."""
    execution, done = ProjectedExecution(execution_id), dict[tuple[str, int], int]()
    for counted in await connection.fetch(queries.DONE_UNTIL, execution_id, event_id):
        done[(counted["node_name"], counted["visit"])] = counted["done"]
    execution.apply(await connection.fetch(queries.EVENTS_UNTIL, execution_id, event_id), done)
    return execution if execution.created_at is not None else None


def _stop(window: Any, others: Sequence[int]) -> str | None:
    """Returns the first transaction after a batch; None if there are no events.

    The batch stops at the first of ``others``, the checkpoints of the shards that are further ahead.
    """
    if window["first"] is None or int(window["first"]) >= int(window["horizon"]):
        return None
    bound = int(window["bound"]) if window["bound"] is not None else int(window["horizon"])
    return str(min(int(window["horizon"]), max(bound, int(window["first"]) + 1), *others[:1]))
