"""Where all transports end: workers' events into the log, and their commands out of the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import asyncpg

from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.transport import queries
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType

FEW = 100
"""So many events go into the log in one statement; above, a transaction with a COPY is quicker."""

KNOWN_EXECUTIONS = 10_000
ENDS_CHANNEL = "noetl_command_ends"

Runs = Callable[[str, str, Sequence[float]], None]
"""Takes a step, the tool kind of its commands and for how many seconds each of those that ended now ran."""


class EventIntake:
    """Appends workers' events and does what follows from them in the same transaction.

    Commands that ended leave the queue and are announced to whoever waits for them; heartbeats extend
    leases. Events that come twice, too late or in any order change nothing more.

    Args:
        lease_seconds: how long a claim lasts without a heartbeat.
        observe: told after each commit of the commands that left the queue, for each step in it.
    """

    def __init__(self, log: EventLog, lease_seconds: float, *, observe: Runs | None = None) -> None:
        self.log = log
        self._lease_seconds = lease_seconds
        self._observe = observe
        self._known: OrderedDict[int, None] = OrderedDict()

    async def handle_events(self, events: Sequence[Event], *, connection: Any = None) -> set[int]:
        """Takes events; returns the ids of those that the log did not have.

        Claims of commands whose execution is cancelled are left out.

        Args:
            connection: one with a transaction of the caller's, which these events join.
        """
        if not events:
            return set()
        claimed = sorted(
            {event.execution_id for event in events if event.event_type == EventType.COMMAND_CLAIMED}
        )
        if connection is None and len(events) > FEW and not claimed:
            try:
                return await self._copy(events)
            except (asyncpg.UniqueViolationError, TypeError):
                pass  # something comes twice, or cannot be written: which, is told below
        columns = map(list, zip(*map(as_row, events), strict=True))
        row = await (connection or self.log.pool).fetchrow(
            queries.TAKE, *self._consequences(events), claimed, *columns
        )
        self._tell(row["runs"])
        return set(row["inserted"] or ())

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

    async def _copy(self, events: Sequence[Event]) -> set[int]:
        async with self.log.pool.acquire() as connection, connection.transaction():
            # rows of the queue are locked first, as everybody does it
            runs = await connection.fetchval(queries.SETTLE, *self._consequences(events))
            await connection.copy_records_to_table(
                "event", schema_name="noetl", columns=COLUMNS, records=map(as_row, events)
            )
        self._tell(runs)
        return {event.event_id for event in events}

    def _tell(self, runs: Iterable[tuple[str, str, list[float]]] | None) -> None:
        if self._observe is not None:
            for step, tool_kind, seconds in runs or ():
                self._observe(step, tool_kind, seconds)

    def _consequences(self, events: Sequence[Event]) -> tuple[Any, ...]:
        """The parameters of what follows from the events."""
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
