"""Reads the events of one execution in the order of their commits, for readers that continue where they stopped.

The order of ids is not enough for them: an event with a smaller id may be committed later. Each row has the id of the
transaction that wrote it, and no row can appear below the oldest running transaction, so a reader that stays below it
skips nothing and reads nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Self

import asyncpg

from noetl_dagster.events import queries
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.log import as_event
from noetl_dagster.events.projection_queries import FORGET, RESET_CHECKPOINTS
from noetl_dagster.events.types import Event

logger = logging.getLogger(__name__)

WINDOW = 5_000
"""Maximum number of events, of any execution, that one call reads from the end of the log."""


# Whether the log has events of transactions that this server has not reached.
_IS_FOREIGN = """
SELECT COALESCE((SELECT xact_id FROM noetl.event ORDER BY event.xact_id DESC LIMIT 1)
    >= pg_snapshot_xmax(pg_current_snapshot()), false)
"""
# Keeps the order; events that get the same number are read in the order of their ids, as those of one transaction are.
_RENUMBER = """
UPDATE noetl.event SET xact_id = (3 + floor(
    event.xact_id::text::numeric * (pg_snapshot_xmin(pg_current_snapshot())::text::numeric - 4) / last))::text::xid8
FROM (SELECT 1 + max(xact_id::text::numeric) AS last FROM noetl.event) log
"""


class Position(NamedTuple):
    """A place in the order of commits: the transaction of an event, and its id among those of the transaction."""

    xact_id: int
    event_id: int

    def __str__(self) -> str:
        return f"{self.xact_id}-{self.event_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what ``str`` returned.

        Raises:
            ValueError: it is no position.
        """
        xact_id, _, event_id = text.partition("-")
        return cls(int(xact_id), int(event_id))


START = Position(0, 0)

POLL_SECONDS = 0.5
"""Seconds between two reads while nothing happens."""

AWAY_SECONDS = 2.0
"""Seconds until the next read after the database was unavailable."""


class Committed(NamedTuple):
    """An event and its place in the order of commits."""

    position: Position
    event: Event


class CommittedPage(NamedTuple):
    """Consecutive events of an execution. There may be none, even if it is not the last page.

    Attributes:
        position: where the next page begins.
        is_last: there are no further events whose place is certain yet.
    """

    events: list[Committed]
    position: Position
    is_last: bool


async def events_in_commit_order(
    pool: asyncpg.Pool, execution_id: int, after: Position = START, *, limit: int = WINDOW
) -> CommittedPage:
    """Returns up to ``limit`` events of an execution strictly after a position.

    It returns an event once no older transaction runs, mostly within milliseconds of its commit. If few events follow
    the position, whatever their execution, it reads these. Otherwise it reads the execution by its own index if it is
    small. Of a large one it reads a window of the log at a time, so that every call is short.
    """
    limit = min(limit, WINDOW)
    if after != START:
        page, window_is_full = await _in_window(pool, execution_id, after, limit)
        if not window_is_full or await pool.fetchval(queries.IS_LARGE, execution_id, WINDOW):
            return page
    elif await pool.fetchval(queries.IS_LARGE, execution_id, WINDOW):
        first = int(await pool.fetchval(queries.FIRST_TRANSACTION, execution_id))
        return (await _in_window(pool, execution_id, Position(first, 0), limit))[0]
    rows = await pool.fetch(queries.COMMITTED_OF_SMALL, execution_id, str(after.xact_id), after.event_id, limit)
    return _page(rows, limit, Position(int(rows[0]["horizon"]), 0), reached_end=True)


async def follow(pool: asyncpg.Pool, execution_id: int, after: Position = START) -> AsyncIterator[Event]:
    """Yields the events of an execution strictly after a position, in the order of their commits, until it ends.

    A short outage of the database only delays it.
    """
    passed = after  # pages go back to the horizon if it is lower: an older transaction may still run
    while True:
        try:
            page = await events_in_commit_order(pool, execution_id, after)
            ended = page.is_last and await has_ended(pool, execution_id, page.position)
        except DATABASE_AWAY as error:
            logger.warning("the event log cannot be read now: %s", error)
            await asyncio.sleep(AWAY_SECONDS)
            continue
        for one in page.events:
            if one.position > passed:
                yield one.event
        after = page.position
        if ended:
            return
        if page.is_last:
            await asyncio.sleep(POLL_SECONDS)


async def horizon(pool: asyncpg.Pool) -> Position:
    """Returns the position before which all transactions have ended.

    A reader that reads the log in any order afterwards, and then continues from this position, misses nothing.
    """
    return Position(int(await pool.fetchval(queries.HORIZON)), 0)


async def has_ended(pool: asyncpg.Pool, execution_id: int, position: Position) -> bool:
    """Returns whether an execution had ended at the position of a last page; it may be resumed afterwards."""
    return bool(await pool.fetchval(queries.HAS_ENDED, execution_id, str(position.xact_id)))


async def is_of_another_server(connection: Any) -> bool:
    """Returns whether the log was restored from the dump of a server that counted more transactions than this one."""
    return bool(await connection.fetchval(_IS_FOREIGN))


async def adopt(connection: Any) -> None:
    """Renumbers the transactions of such a log, whose events its readers would skip, and projects it from the start.

    A dump contains the numbers of its server's transactions, and another server begins to count anew. Within the
    caller's transaction, which no other process of this log may accompany.
    """
    if not await is_of_another_server(connection):  # mostly, and then nobody waits for a lock
        return
    await connection.execute("LOCK TABLE noetl.event IN SHARE ROW EXCLUSIVE MODE")
    if not await is_of_another_server(connection):  # another process was faster
        return
    logger.warning("the log was restored from another server; the transactions of its events are renumbered")
    await connection.execute(_RENUMBER)
    await connection.execute(RESET_CHECKPOINTS)
    await connection.execute(FORGET)


async def position_of(pool: asyncpg.Pool, execution_id: int, event_id: int) -> Position | None:
    """Returns the place of an event in the order of commits; None if the log has no such event."""
    xact_id = await pool.fetchval(queries.TRANSACTION_OF, execution_id, event_id)
    return None if xact_id is None else Position(int(xact_id), event_id)


async def _in_window(pool: asyncpg.Pool, execution_id: int, after: Position, limit: int) -> tuple[CommittedPage, bool]:
    """Returns the events in the next window of the log, and whether the log goes on after it."""
    rows = await pool.fetch(
        queries.COMMITTED_IN_WINDOW, execution_id, str(after.xact_id), after.event_id, limit, WINDOW
    )
    seen = rows[0]
    full = seen["seen"] >= WINDOW
    end = Position(int(seen["last_xact_id"]), seen["last_event_id"]) if full else Position(int(seen["horizon"]), 0)
    return _page(rows, limit, end, reached_end=not full), full


def _page(rows: list[asyncpg.Record], limit: int, end: Position, *, reached_end: bool) -> CommittedPage:
    """Makes a page of rows with an event each, or of one row without."""
    events = []
    for row in rows:
        if row["event_id"] is not None:
            position = Position(int(row["xact_id"]), row["event_id"])
            events.append(Committed(position, as_event({name: row[name] for name in queries.COLUMNS})))
    if len(events) >= limit:
        return CommittedPage(events, events[-1].position, is_last=False)
    return CommittedPage(events, end, reached_end)
