"""Where all transports end: workers' events into the log, and their commands out of the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import orjson

from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType
from noetl_dagster.transport import queries

NOTICE_BYTES = 7_000
"""PostgreSQL carries notices below 8,000 bytes."""

KNOWN_EXECUTIONS = 10_000
ENDS_CHANNEL = "noetl_command_ends"


class EventIntake:
    """Appends workers' events and does what follows from them in the same transaction.

    Commands that ended leave the queue and are announced to whoever waits for them; heartbeats extend
    leases. Events that come twice, too late or in any order change nothing more.

    Args:
        lease_seconds: how long a claim lasts without a heartbeat.
    """

    def __init__(self, log: EventLog, lease_seconds: float) -> None:
        self.log = log
        self._lease_seconds = lease_seconds
        self._known: OrderedDict[int, None] = OrderedDict()

    async def handle_events(self, events: Sequence[Event], *, connection: Any = None) -> set[int]:
        """Takes events; returns the ids of those that the log did not have.

        Args:
            connection: one with a transaction of the caller's, which these events join.
        """
        ended = [event for event in events if event.event_type in COMMAND_ENDS]
        beats = [event for event in events if event.event_type == EventType.COMMAND_HEARTBEAT]
        if connection is None and not ended and not beats:
            return await self.log.append(events)
        async with self._transaction(connection) as own:
            inserted = await self._append(own, events)
            if ended:
                await self._settle(own, ended)
            if beats:
                keys = [[event.execution_id for event in beats], _command_ids(beats)]
                workers = [event.worker_id for event in beats]
                await own.execute(queries.RENEW, *keys, workers, self._lease_seconds)
        return inserted

    async def unknown_executions(self, ids: Iterable[int]) -> set[int]:
        """Which executions the log has never heard of."""
        asked = {one for one in ids if one not in self._known}
        if not asked:
            return set()
        found = await self.log.pool.fetch(queries.KNOWN_EXECUTIONS, list(asked))
        for record in found:
            self._known[record["execution_id"]] = None
        while len(self._known) > KNOWN_EXECUTIONS:
            self._known.popitem(last=False)
        return asked - {record["execution_id"] for record in found}

    @asynccontextmanager
    async def _transaction(self, connection: Any) -> AsyncIterator[Any]:
        if connection is not None:
            yield connection
            return
        async with self.log.pool.acquire() as own, own.transaction():
            yield own

    async def _append(self, connection: Any, events: Sequence[Event]) -> set[int]:
        """COPY where nothing comes twice, row by row in one statement where something does."""
        try:
            async with connection.transaction():
                await connection.copy_records_to_table(
                    "event", schema_name="noetl", columns=COLUMNS, records=[as_row(event) for event in events]
                )
            return {event.event_id for event in events}
        except asyncpg.UniqueViolationError:
            return await self.log.append(events, connection=connection)

    async def _settle(self, connection: Any, ended: list[Event]) -> None:
        rows = await connection.fetch(
            queries.SETTLE, [event.execution_id for event in ended], _command_ids(ended)
        )
        for notice in notices([row["command_id"] for row in rows]):
            await connection.execute(queries.ANNOUNCE, notice)


def notices(command_ids: Iterable[str]) -> list[str]:
    """Command ids as JSON lists, each small enough for one notice."""
    lists: list[str] = []
    waiting: list[str] = []
    size = 2
    for command_id in command_ids:
        needed = len(orjson.dumps(command_id)) + 1
        if waiting and size + needed > NOTICE_BYTES:
            lists.append(orjson.dumps(waiting).decode())
            waiting, size = [], 2
        waiting.append(command_id)
        size += needed
    if waiting:
        lists.append(orjson.dumps(waiting).decode())
    return lists


def _command_ids(events: Iterable[Event]) -> list[str]:
    return [str(event.meta.get("command_id", "")) for event in events]
