"""Makes partitions of the log ahead, and drops old ones with everything that belongs to their executions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from noetl_dagster.engine.steps.watermarks import keep_watermarks
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.schema import HeldError, change_schema, make_partitions, partitions
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.worker.running import remove_orphans

logger = logging.getLogger(__name__)

DROP_SECONDS = 30.0
"""How long dropping a partition is tried again while queries use the log; then the next maintenance tries."""

WORKERS_KEPT = timedelta(days=1)
"""Workers that have been silent for longer are forgotten: names of pods never come back."""

# By the log: the projection may be behind, and what it misses is lost with the partition.
_RUNNING = """
SELECT EXISTS (
    SELECT FROM noetl.event opened
    WHERE opened.execution_id >= $1 AND opened.execution_id < $2
      AND opened.event_type IN ('playbook.initialized', 'execution.resumed')
      AND NOT EXISTS (
        SELECT FROM noetl.event later
        WHERE later.execution_id = opened.execution_id AND later.event_id > opened.event_id
          AND later.event_type IN
            ('playbook.completed', 'playbook.failed', 'execution.cancelled', 'execution.resumed')))
"""
_EXPIRE_RESULTS = """
UPDATE noetl.result_ref SET expires_at = least(expires_at, $3)
WHERE execution_id >= $1 AND execution_id < $2 AND scope <> 'permanent'
"""
_FORGET = "DELETE FROM noetl.{name} WHERE execution_id >= $1 AND execution_id < $2"
_FORGET_WORKERS = "DELETE FROM noetl.runtime WHERE heartbeat < $1"
_FORGET_TOKENS = "DELETE FROM noetl.keychain WHERE expires_at <= $1"
_FREEZE = "LOCK TABLE noetl.{name} IN SHARE ROW EXCLUSIVE MODE"
_DROP = "DROP TABLE noetl.{name}"


@dataclass(frozen=True, slots=True)
class Maintained:
    """The outcome of a maintenance.

    Attributes:
        still_running: partitions that are old enough but hold running executions.
        results: stored results that were deleted, all expired ones included.
        orphans: stored objects that were deleted because no result names them.
        containers: jobs of containers that were deleted because their commands had ended.
    """

    made: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    still_running: tuple[str, ...] = ()
    executions: int = 0
    results: int = 0
    orphans: int = 0
    containers: int = 0

    def __str__(self) -> str:
        made, dropped = (", ".join(names) or "none" for names in (self.made, self.dropped))
        text = (
            f"partitions made: {made}; dropped: {dropped} with {self.executions} "
            f"executions; {self.results} expired results and {self.orphans} orphaned objects deleted"
        )
        return f"{text}, {self.containers} jobs of containers" if self.containers else text


class Maintenance:
    """Keeps the log within its ``retention`` (None: for ever). Running it twice at the same time is harmless.

    Args:
        width: of a partition of the log; None: a month.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        results: ResultStore,
        retention: timedelta | None = None,
        *,
        width: timedelta | None = None,
    ) -> None:
        self._pool = pool
        self._results = results
        self._retention = retention
        self._width = width

    async def run(self, now: datetime | None = None) -> Maintained:
        """Makes the coming partitions, drops the old ones, deletes expired results, tokens and workers."""
        now = now or datetime.now(UTC)
        await Projection(self._pool).catch_up(patient=True)
        orphans = await self._results.sweep_orphans(now)  # while their executions are still known
        containers = await remove_orphans(self._pool)
        dropped: list[str] = []
        still_running: list[str] = []
        executions = 0
        async with self._pool.acquire() as connection:
            made = await make_partitions(connection, now, self._width)
            for name, ids in await self._old(connection, now):
                forgotten = await self._drop(connection, name, ids, now)
                (still_running if forgotten is None else dropped).append(name)
                executions += forgotten or 0
        await self._pool.execute(_FORGET_TOKENS, now)
        await self._pool.execute(_FORGET_WORKERS, now - WORKERS_KEPT)
        results = await self._results.cleanup(now)
        return Maintained(tuple(made), tuple(dropped), tuple(still_running), executions, results, orphans, containers)

    async def _old(self, connection: Any, now: datetime) -> list[tuple[str, range]]:
        """Returns the partitions that lie completely before the retention, with their execution ids."""
        if self._retention is None:
            return []
        oldest = snowflake_floor(now - self._retention)
        ranges = (await partitions(connection)).items()
        old = ((name, ids) for name, ids in ranges if ids is not None and ids.stop <= oldest)
        return sorted(old, key=lambda one: one[1].start)

    async def _drop(self, connection: Any, name: str, ids: range, now: datetime) -> int | None:
        """Drops a partition with its executions; returns their number, or None when the partition stays for now."""
        start, end = ids.start, ids.stop

        async def drop() -> int | None:
            if name not in await partitions(connection):
                return 0  # another maintenance dropped it
            await connection.execute(_FREEZE.format(name=name))  # from here on no execution of it is resumed
            if await connection.fetchval(_RUNNING, start, end):
                logger.warning("partition %s is past its retention but holds running executions", name)
                return None
            await keep_watermarks(connection, self._pool, start, end)
            await connection.execute(_EXPIRE_RESULTS, start, end, now)
            for table in ("execution_shard", "queue", "cursor_frame"):
                await connection.execute(_FORGET.format(name=table), start, end)
            tag = await connection.execute(_FORGET.format(name="execution"), start, end)
            await connection.execute(_DROP.format(name=name))  # last, since nobody appends events until the commit
            return int(tag.rpartition(" ")[2])  # such as DELETE 3

        try:
            return await change_schema(connection, drop, DROP_SECONDS)
        except HeldError as error:
            logger.warning("partition %s is in use; the next maintenance drops it: %s", name, error)
            return None
