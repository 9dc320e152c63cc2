"""The projection worker: reads the log in commit order and keeps ``noetl.execution`` up to date.

Each row of the log carries the id of the transaction that wrote it. Below the oldest transaction that still
runs nothing can appear any more, so a reader that stays below it skips nothing, whatever the order of
commits. State and checkpoint change in one transaction: a worker that is killed has done a batch or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.projection_row import Done, ProjectedExecution
from noetl_dagster.process import log_context
from noetl_dagster.process.event_loop import cancel_and_wait

logger = logging.getLogger(__name__)

BATCH = 20_000
"""Events taken in one transaction, about: a transaction's events are never divided."""

TAIL_LIMIT = 5_000
"""Events after the checkpoint that a reader puts on top of a row; beyond, it reads the whole execution."""

INTERVAL = 0.5
"""Seconds between two looks at the log while nothing happens."""


@dataclass(frozen=True, slots=True)
class ShardLag:
    """How far a shard is behind: the age in seconds of its oldest waiting event; ``events`` it has seen."""

    shard: int
    seconds: float
    events: int


class Projection:
    """Keeps the projection. Any number may run: a shard is worked on by one of them at a time.

    Attributes:
        turned: when it last took a batch, monotonic.
    """

    def __init__(self, pool: asyncpg.Pool, *, batch: int = BATCH) -> None:
        self._pool = pool
        self._batch = batch
        self.turned = time.monotonic()

    async def catch_up(self, *, patient: bool = False) -> int:
        """Takes everything that has settled by now; returns the number of events it went through.

        Args:
            patient: waits for another worker that is at it. By default what that has is left to it.
        """
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        total = 0
        while (taken := await self._take(patient)) is not None:
            self.turned = time.monotonic()
            total += taken
        return total

    async def lag(self) -> list[ShardLag]:
        """The lag of every shard, by number."""
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        return [
            ShardLag(
                shard=row["shard"],
                seconds=max(row["seconds"], 0.0),
                events=row["events"],
            )
            for row in await self._pool.fetch(queries.LAG)
        ]

    async def lag_seconds(self) -> float:
        """The age in seconds of the oldest event that is not in the projection, 0 when all are."""
        return max((shard.seconds for shard in await self.lag()), default=0.0)

    async def rebuild(self) -> int:
        """Forgets the projection and replays the whole log; returns the number of events."""
        await self._pool.execute(queries.MAKE_CHECKPOINTS)
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.LOCK_CHECKPOINTS)  # waits for the workers of all shards
            await connection.execute(queries.RESET_CHECKPOINTS)
            await connection.execute(queries.FORGET)
        return await self.catch_up(patient=True)

    async def _take(self, patient: bool) -> int | None:
        """One batch of the shards that are furthest behind: rows and checkpoints in one transaction.

        Shards that stand at the same place, as they do once they have caught up, are read together.

        Returns:
            The events of the batch, whatever shards they belong to; None when there is nothing to take.
        """
        async with self._pool.acquire() as connection, connection.transaction():
            lock = queries.LOCK_CHECKPOINTS if patient else queries.LOCK_FREE_CHECKPOINTS
            free = await connection.fetch(lock)
            places = sorted({int(row["xact_id"]) for row in free})
            if not places:
                return None
            start = str(places[0])
            shards = [row["shard"] for row in free if row["xact_id"] == start]
            window = await connection.fetchrow(queries.WINDOW, start, self._batch)
            stop = _stop(window, places[1:])
            if stop is None:
                return None
            count = int(await connection.fetchval(queries.COUNT, start, stop))
            await self._project(connection, shards, start, stop)
            await connection.execute(queries.MOVE_CHECKPOINTS, shards, stop, count)
            return count

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
        known = {row["execution_id"]: row for row in await connection.fetch(queries.EXECUTIONS, ids)}
        rows = []
        for execution_id in ids:
            row = known.get(execution_id)
            execution = ProjectedExecution(**row) if row is not None else ProjectedExecution(execution_id)
            execution.apply(events.get(execution_id, ()), done.get(execution_id, {}))
            if execution.created_at is not None:  # not so for late events of an execution that was dropped
                rows.append(execution)
        columns = [[getattr(row, name) for row in rows] for name in queries.EXECUTION_COLUMNS]
        await connection.execute(queries.PUT_EXECUTIONS, *columns)


class BackgroundProjection:
    """Runs the projection beside the work of a process, and a little longer.

    Args:
        linger: seconds that it goes on after the last work, for the events of the end; longer while some have
            not settled, since a transaction that is older than they still runs.
    """

    def __init__(self, projection: Projection, *, linger: float = 2.0) -> None:
        self._projection = projection
        self._linger = linger
        self._users = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The projection runs at least until the block ends."""
        self._users += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), context=log_context.empty())
        try:
            yield
        finally:
            self._users -= 1

    async def close(self) -> None:
        """Stops it, after a last look at the log."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
        self._task = None
        with suppress(*DATABASE_AWAY):
            await self._projection.catch_up()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._linger
        behind = False
        while behind or loop.time() < until:
            try:
                await self._projection.catch_up()
                behind = await self._projection.lag_seconds() > 0
            except DATABASE_AWAY as error:
                logger.warning("the projection cannot go on just now: %s", error)
            await asyncio.sleep(INTERVAL)
            if self._users:
                until = loop.time() + self._linger


async def read_execution(pool: asyncpg.Pool, execution_id: int) -> ProjectedExecution | None:
    """One execution as it stands now: its row, with what was committed since the checkpoint on top.

    Returns:
        None when the log has no such execution.
    """
    # No transaction is needed: the row is that of the checkpoint, whatever was projected since, and the tail
    # is all that came after the checkpoint.
    async with pool.acquire() as connection:
        row = dict(await connection.fetchrow(queries.ROW_AND_CHECKPOINT, execution_id))
        checkpoint = row.pop("checkpoint") or "0"
        has_tail = row.pop("has_tail")
        known = row["execution_id"] is not None
        execution = ProjectedExecution(**row) if known else ProjectedExecution(execution_id)
        if not has_tail:
            return execution if known else None
        tail = await connection.fetch(queries.TAIL, execution_id, checkpoint, TAIL_LIMIT)
        if tail[0]["seen"] >= TAIL_LIMIT:
            execution = await _from_log(connection, execution_id)
        else:
            _put_on_top(execution, [event for event in tail if event["event_id"] is not None])
    return execution if execution.created_at is not None else None


def _put_on_top(execution: ProjectedExecution, tail: list[Any]) -> None:
    done: Done = defaultdict(int)
    for event in tail:
        if event["done"]:
            done[(event["node_name"], event["visit"])] += event["done"]
    execution.apply((event for event in tail if event["is_change"]), done)


async def _from_log(connection: Any, execution_id: int) -> ProjectedExecution:
    execution = ProjectedExecution(execution_id)
    rows = await connection.fetch(queries.DONE_OF_EXECUTION, execution_id)
    done = {(row["node_name"], row["visit"]): row["done"] for row in rows}
    execution.apply(await connection.fetch(queries.EVENTS_OF_EXECUTION, execution_id), done)
    return execution


def _stop(window: Any, others: Sequence[int]) -> str | None:
    """The first transaction that a batch leaves for the next one; None when there is nothing to take.

    Args:
        others: where the shards stand that are further on, in order: the first of them is not passed by.
    """
    if window["first"] is None or int(window["first"]) >= int(window["horizon"]):
        return None
    bound = int(window["bound"]) if window["bound"] is not None else int(window["horizon"])
    return str(min(int(window["horizon"]), max(bound, int(window["first"]) + 1), *others[:1]))
