"""The end of every transport: workers' events enter the log, and ended commands leave the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import asyncpg

from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.base import Transport
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType

STATEMENT_EVENTS = 100
"""Up to this many events are inserted by one statement; beyond it a transaction with a COPY is faster."""

KNOWN_EXECUTIONS = 10_000
ENDS_CHANNEL = "noetl_command_ends"

ObserveRuns = Callable[[str, str, Sequence[float]], None]
"""Takes a step, the tool kind of its commands, and the seconds that each command which has just ended ran."""


class EventHandler:
    """Appends workers' events and applies their consequences in the same transaction.

    Ended commands leave the queue and are announced to the processes that wait for them; heartbeats extend
    leases. Events that arrive twice, too late or out of order change nothing further.

    Args:
        lease_seconds: a claim lasts this long without a heartbeat.
        observe: called after each commit, once per step, with the commands that left the queue.
    """

    def __init__(self, log: EventLog, lease_seconds: float, *, observe: ObserveRuns | None = None) -> None:
        self.log = log
        self._lease_seconds = lease_seconds
        self._observe = observe
        self._known: OrderedDict[int, None] = OrderedDict()

    async def handle_events(self, events: Sequence[Event], *, connection: Any = None) -> set[int]:
        """Appends events, also within the caller's transaction, and returns the ids of those that are new to the log.

        Claims of commands whose execution is cancelled are omitted.
        """
        if not events:
            return set()
        claimed = sorted({one.execution_id for one in events if one.event_type == EventType.COMMAND_CLAIMED})
        if connection is None and len(events) > STATEMENT_EVENTS and not claimed:
            try:
                return await self._copy(events)
            except (asyncpg.UniqueViolationError, TypeError):
                pass  # a duplicate, or a value that cannot be written: the statement below finds out which
        columns = map(list, zip(*map(as_row, events), strict=True))
        row = await (connection or self.log.pool).fetchrow(queries.TAKE, *self._consequences(events), claimed, *columns)
        self._report(row["runs"])
        return set(row["inserted"] or ())

    async def unknown_executions(self, ids: Iterable[int]) -> set[int]:
        """Returns the executions that the log does not contain."""
        asked = {one for one in ids if one not in self._known}
        if not asked:
            return set()
        found = await self.log.pool.fetch(queries.KNOWN_EXECUTIONS, list(asked))
        for record in found:
            self._known[record["execution_id"]] = None
        while len(self._known) > KNOWN_EXECUTIONS:
            self._known.popitem(last=False)
        return asked - {record["execution_id"] for record in found}

    async def _copy(self, events: Sequence[Event]) -> set[int]:
        async with self.log.pool.acquire() as connection, connection.transaction():
            # every writer locks rows of the queue before it writes events
            runs = await connection.fetchval(queries.SETTLE, *self._consequences(events))
            await connection.copy_records_to_table(
                "event", schema_name="noetl", columns=COLUMNS, records=map(as_row, events)
            )
        self._report(runs)
        return {event.event_id for event in events}

    def _report(self, runs: Iterable[tuple[str, str, list[float]]] | None) -> None:
        if self._observe is not None:
            for step, tool_kind, seconds in runs or ():
                self._observe(step, tool_kind, seconds)

    def _consequences(self, events: Sequence[Event]) -> tuple[Any, ...]:
        """Returns the parameters of ``noetl.settle``."""
        ended = [event for event in events if event.event_type in COMMAND_ENDS]
        beats = [event for event in events if event.event_type == EventType.COMMAND_HEARTBEAT]
        return (
            [event.execution_id for event in ended],
            _command_ids(ended),
            [event.duration for event in ended],
            [event.execution_id for event in beats],
            _command_ids(beats),
            [event.worker_id for event in beats],
            self._lease_seconds,
        )


def _command_ids(events: Iterable[Event]) -> list[str]:
    return [str(event.meta.get("command_id", "")) for event in events]


class DirectTransport(Transport):
    """Carries the events of a worker that shares the event log's database; its event buffer retries failures."""

    transactional = True

    def __init__(self, handler: EventHandler) -> None:
        self._handler = handler

    async def publish(self, events: Sequence[Event]) -> None:
        """Appends the events to the log."""
        await self._handler.handle_events(events)

    async def append(self, events: Sequence[Event], *, connection: Any = None, gated: bool = False) -> set[int]:
        """Appends events within the transaction of a connection, if given, and returns the ids of the new ones."""
        if connection is None:
            return await super().append(events)
        return await self._handler.handle_events(events, connection=connection)
