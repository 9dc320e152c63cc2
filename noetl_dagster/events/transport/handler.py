"""The end of every transport: workers' events enter the log, and ended commands leave the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.events.log import EventLog, as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.base import Transport, note_refused
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType

STATEMENT_EVENTS = 100
"""Up to this many events are inserted by one statement; beyond it a transaction with a COPY is faster."""

KNOWN_EXECUTIONS = 10_000
ENDS_CHANNEL = "noetl_command_ends"

OWN_META = [
    *("tasks", "final", "sink", "reached", "watermark", "note", "chunk_index", "has_more", "row_count", "clock_skew"),
]
"""Keys that the events of a worker add to the meta of their command."""

_OWN = frozenset(OWN_META)

ObserveRuns = Callable[[str, str, Sequence[float]], None]
"""Takes a step, the tool kind of its commands, and the seconds that each command which has just ended ran."""


class Intake(NamedTuple):
    """What became of workers' events.

    Attributes:
        new: ids of events that are new to the log.
        refused: ids of events that the log neither has nor takes, because their sender does not hold the command: it
            has ended, was never issued, or another worker has claimed it.
    """

    new: set[int]
    refused: set[int]


class EventHandler:
    """Appends events and applies their consequences in the same transaction.

    Ended commands leave the queue and are announced to the processes that wait for them; heartbeats extend
    leases. Events that arrive twice change nothing further.

    Args:
        lease_seconds: a claim lasts this long without a heartbeat.
        observe: called after each commit, once per step, with the commands that left the queue.
    """

    def __init__(self, log: EventLog, lease_seconds: float, *, observe: ObserveRuns | None = None) -> None:
        self.log = log
        self._lease_seconds = lease_seconds
        self._observe = observe
        self._known: OrderedDict[int, None] = OrderedDict()

    async def take_events(
        self, events: Sequence[Event], pools: Collection[str] | None = None, *, connection: Any = None
    ) -> Intake:
        """Appends events of workers, also within the caller's transaction: those whose sender holds the command.

        The holder is the worker that has claimed the command last; the event's parent is that claim.

        Args:
            pools: the pools of the sender; None: any.
        """
        if not events:
            return Intake(set(), set())
        own = await self._of_own_watermarks(events, connection)
        claims = [event.parent_event_id or 0 for event in own]
        new = await self._write(own, pools, claims, connection) if own else set()
        refused = {event.event_id for event in events} - new
        if refused:  # or the log has them already
            asked = [event for event in events if event.event_id in refused]
            refused -= await self.log.present(asked, connection=connection)
        return Intake(new, refused)

    async def handle_events(self, events: Sequence[Event], *, connection: Any = None) -> set[int]:
        """Appends events of the control plane, also within the caller's transaction; returns the ids of new ones.

        Claims of commands whose execution is cancelled are omitted.
        """
        return await self._write(events, None, None, connection) if events else set()

    async def _write(
        self, events: Sequence[Event], pools: Collection[str] | None, claims: Sequence[int] | None, connection: Any
    ) -> set[int]:
        """Appends events, if they come with ``claims`` those whose senders hold their commands by these."""
        claimed = sorted({one.execution_id for one in events if one.event_type == EventType.COMMAND_CLAIMED})
        consequences = self._consequences(events, pools, claims)
        if connection is None and len(events) > STATEMENT_EVENTS and not claimed:
            try:
                return await self._copy(events, consequences)
            except (asyncpg.UniqueViolationError, TypeError):
                pass  # a duplicate, or a value that cannot be written: the statement below finds out which
        columns = map(list, zip(*map(as_row, events), strict=True))
        row = await (connection or self.log.pool).fetchrow(queries.TAKE, *consequences, claimed, *columns)
        self._report(row["runs"])
        return set(row["inserted"] or ())

    async def _of_own_watermarks(self, events: Sequence[Event], connection: Any) -> Sequence[Event]:
        """Returns the events without those that would move a watermark other than that of their own step."""
        moving = [event for event in events if "watermark" in event.meta]
        if not moving:
            return events
        places = [(one.event_id, one.execution_id, one.node_name, _place(one.meta["watermark"])) for one in moving]
        columns = map(list, zip(*places, strict=True))
        rows = await (connection or self.log.pool).fetch(queries.FOREIGN_WATERMARKS, *columns)
        foreign = {row["event_id"] for row in rows}
        return [event for event in events if event.event_id not in foreign]

    async def unknown_executions(self, ids: Iterable[int]) -> set[int]:
        """Returns the executions that the log does not contain."""
        asked = {one for one in ids if one not in self._known}
        if not asked:
            return set()
        records = await self.log.pool.fetch(queries.KNOWN_EXECUTIONS, list(asked))
        for record in records:
            self._known[record["execution_id"]] = None
        while len(self._known) > KNOWN_EXECUTIONS:
            self._known.popitem(last=False)
        return asked - {record["execution_id"] for record in records}

    async def _copy(self, events: Sequence[Event], consequences: tuple[Any, ...]) -> set[int]:
        async with self.log.pool.acquire() as connection, connection.transaction():
            # every writer locks rows of the queue before it writes events
            row = await connection.fetchrow(queries.SETTLE, *consequences)
            if consequences[0]:
                taken = set(row["taken"] or ())
                events = [event for event in events if event.event_id in taken]
            await connection.copy_records_to_table(
                "event", schema_name="noetl", columns=COLUMNS, records=map(as_row, events)
            )
        self._report(row["runs"])
        return {event.event_id for event in events}

    def _report(self, runs: Iterable[tuple[str, str, list[float]]] | None) -> None:
        if self._observe is not None:
            for step, tool_kind, seconds in runs or ():
                self._observe(step, tool_kind, seconds)

    def _consequences(
        self, events: Sequence[Event], pools: Collection[str] | None, claims: Sequence[int] | None
    ) -> tuple[Any, ...]:
        """Returns the parameters of ``noetl.settle``."""
        checked = claims is not None
        sent = list(zip(events, claims or repeat(0)))  # noqa: B905 - repeat never ends
        ended = [one for one in sent if one[0].event_type in COMMAND_ENDS]
        others = [one for one in sent if one[0].event_type in _WHILE_RUNNING]
        return (
            checked,
            None if pools is None else list(pools),
            OWN_META,
            *_columns(ended, checked),
            [event.duration for event, _ in ended],
            *_columns(others, checked),
            [event.event_type == EventType.COMMAND_HEARTBEAT for event, _ in others],
            self._lease_seconds,
        )


def _place(watermark: Any) -> dict[str, Any]:
    """Returns what names a watermark; null stands for what is missing, which no watermark has."""
    fields = watermark if isinstance(watermark, dict) else {}
    return {name: fields.get(name) for name in ("playbook", "name", "partition", "since")}


_WHILE_RUNNING = frozenset({EventType.COMMAND_HEARTBEAT, EventType.CALL_PARTIAL})


def _columns(sent: Sequence[tuple[Event, int]], checked: bool) -> tuple[list[Any], ...]:
    """Returns ids, executions, commands, steps, workers, claims and, if ``checked``, the commands' metas of events."""
    return (
        [event.event_id for event, _ in sent],
        [event.execution_id for event, _ in sent],
        [str(event.meta.get("command_id", "")) for event, _ in sent],
        [event.node_name for event, _ in sent],
        [event.worker_id for event, _ in sent],
        [claim for _, claim in sent],
        [{key: value for key, value in event.meta.items() if key not in _OWN} for event, _ in sent] if checked else [],
    )


class DirectTransport(Transport):
    """Carries the events of a worker that shares the event log's database; its event buffer retries failures."""

    transactional = True

    def __init__(self, handler: EventHandler) -> None:
        self._handler = handler

    async def publish(self, events: Sequence[Event]) -> None:
        """Appends the events to the log."""
        await self.append(events)

    async def append(self, events: Sequence[Event], *, connection: Any = None, gated: bool = False) -> set[int]:
        """Appends events within the transaction of a connection, if given, and returns the ids of the new ones."""
        taken = await self._handler.take_events(events, connection=connection)
        note_refused(events, taken.refused)
        return taken.new
