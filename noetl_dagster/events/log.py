"""The event log in PostgreSQL: appends in bulk, and the reads of the control plane."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import asyncpg

from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events import queries
from noetl_dagster.events.connection import KeptConnection
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.values import legible_text

DRIVING = frozenset({EventType.COMMAND_ISSUED, EventType.STEP_EXIT})
"""Events whose driver stops if its execution was cancelled."""

GATED = DRIVING | {EventType.COMMAND_CLAIMED, EventType.COMMAND_COMPLETED, EventType.LOOP_SHARD_DONE}
"""Events that a cancelled execution accepts no more: its commands end with it, nothing starts, and no result counts."""

SMALL_BATCH = 50
"""Events that are inserted by one statement: a transaction with a COPY takes six round trips."""

PAGE = 5_000
"""Events read from the log at a time."""

Connection = Any  # of asyncpg, or one acquired from its pool


def as_row(event: Event) -> tuple[Any, ...]:
    """Returns the values of an event in the order of :data:`queries.COLUMNS`."""
    return (
        event.execution_id,
        event.event_id,
        str(event.event_type),
        event.catalog_id,
        event.parent_event_id,
        event.parent_execution_id,
        event.node_name,
        event.node_type,
        event.status,
        event.duration,
        event.context,
        event.result,
        event.meta,
        event.error and legible_text(SECRETS.redact(event.error)),
        event.current_index,
        event.current_item,
        event.worker_id,
        event.created_at or datetime.now(UTC),
    )


def as_event(record: asyncpg.Record) -> Event:
    """Returns a row of the log as an event."""
    return Event(**record)


class StoredPlaybook(NamedTuple):
    """A playbook of the catalog: its text, its path, and its canonical model as JSON where that is stored."""

    content: str
    path: str
    model: str | None = None


class EventLog:
    """Appends events and reads them back. Safe to share between the tasks of one event loop."""

    transactional = True

    def __init__(self, pool: asyncpg.Pool, ids: Snowflake) -> None:
        self.pool = pool
        self.ids = ids
        self._kept = KeptConnection(pool)

    async def append(
        self, events: Sequence[Event], *, connection: Connection | None = None, gated: bool = False
    ) -> set[int]:
        """Appends events in one statement, without those that a unique index refuses.

        Args:
            gated: omits all of them if their execution is cancelled, like claims.

        Returns:
            The ids of the appended events. Only the caller that gets the id of an event that may exist once proceeds.

        Raises:
            ExecutionCancelledError: a cancelled execution was to issue commands or end a step; nothing is appended.
        """
        if not events:
            return set()
        if len(events) == 1:  # a prepared insert is quicker than starting a COPY
            [event] = events
            appended = await self.append_once(event, connection=connection, gated=gated)
            return {event.event_id} if appended else set()
        if len(events) <= SMALL_BATCH and (new := await self._append_small(events, connection or self._kept, gated)):
            return new
        if connection is not None:
            async with _admitted(connection, events, gated) as admitted:
                return await _insert_new(connection, admitted)
        async with self.pool.acquire() as own:
            try:
                async with _admitted(own, events, gated) as admitted:
                    rows = [as_row(event) for event in admitted]
                    await own.copy_records_to_table("event", schema_name="noetl", columns=queries.COLUMNS, records=rows)
                    return {event.event_id for event in admitted}
            except asyncpg.UniqueViolationError:
                async with _admitted(own, events, gated) as admitted:
                    return await _insert_new(own, admitted)

    async def _append_small(self, events: Sequence[Event], where: Any, all_gated: bool) -> set[int]:
        """Appends a few events in one round trip; nothing if one of their executions is cancelled."""
        columns = [list(column) for column in zip(*map(as_row, events), strict=True)]
        if gates := _gates(events, all_gated):
            records = await where.fetch(queries.INSERT_NEW_GATED, gates, *columns)
        else:
            records = await where.fetch(queries.INSERT_NEW, *columns)
        return {record["event_id"] for record in records}

    async def present(self, events: Sequence[Event], *, connection: Connection | None = None) -> set[int]:
        """Returns which of these events the log holds, for a writer whose connection broke during a commit."""
        records = await (connection or self.pool).fetch(
            queries.PRESENT, [event.execution_id for event in events], [event.event_id for event in events]
        )
        return {record["event_id"] for record in records}

    async def append_once(self, event: Event, *, connection: Connection | None = None, gated: bool = False) -> bool:
        """Appends an event that may exist only once; returns True for the one caller that created it.

        See :meth:`append` for ``gated`` and for events of cancelled executions.
        """
        row, where = as_row(event), connection or self._kept
        if not gated and event.event_type not in GATED:
            return await where.fetchval(queries.INSERT_ONE, *row) is not None
        if await where.fetchval(queries.INSERT_GATED, *row) is not None:
            return True
        if event.event_type in DRIVING:
            closed = await (connection or self.pool).fetch(queries.CLOSED, [event.execution_id])
            _refuse([record["id"] for record in closed])
        return False

    async def append_with_first(self, events: Sequence[Event], *, connection: Connection | None = None) -> bool:
        """Appends events in one statement if their first, which may exist only once, is new; returns whether it is."""
        columns = [list(column) for column in zip(*map(as_row, events), strict=True)]
        where = connection or self._kept
        return await where.fetchval(queries.INSERT_WITH_FIRST, *columns) is not None

    async def lifecycle(self, execution_id: int, *, connection: Connection | None = None) -> list[Event]:
        """Returns the events from which the state of an execution is folded, in order.

        Later events of this process get greater ids, even if those of a clock that was ahead are among them.
        """
        records = await (connection or self.pool).fetch(queries.LIFECYCLE, execution_id)
        if records:
            self.ids.follow(records[-1]["event_id"])
        return [as_event(record) for record in records]

    async def events(self, execution_id: int, *, after: int = 0, page: int = PAGE) -> AsyncIterator[Event]:
        """Yields every event of an execution in the order of their ids, reading ``page`` events at a time."""
        while True:
            records = await self.pool.fetch(queries.EVENTS, execution_id, after, page)
            for record in records:
                yield as_event(record)
            if len(records) < page:
                return
            after = records[-1]["event_id"]

    async def put_source(
        self, path: str, version: str | None, source: str, *, model: str | None = None, lenient: bool = False
    ) -> int:
        """Stores the text of a playbook and returns its catalog id; the same text is stored once.

        Args:
            model: its canonical model as JSON, from which executions continue without reading the text again.
            lenient: it was loaded leniently.
        """
        digest = hashlib.sha256(source.encode()).hexdigest()
        meta = ({} if version is None else {"version": version}) | ({"lenient": True} if lenient else {})
        values = (path, digest, source, meta, model)
        return int(await self.pool.fetchval(queries.CATALOG_PUT, self.ids.next(), *values))

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Returns a playbook that was run, or None."""
        record = await self.pool.fetchrow(queries.CATALOG_SOURCE, catalog_id)
        return StoredPlaybook(*record) if record else None


def _gates(events: Sequence[Event], all_gated: bool) -> list[int]:
    """Returns the executions whose cancellation excludes some of the events."""
    return sorted({event.execution_id for event in events if all_gated or event.event_type in GATED})


@asynccontextmanager
async def _admitted(connection: Connection, events: Sequence[Event], all_gated: bool) -> AsyncIterator[Sequence[Event]]:
    """Yields the events that no cancellation excludes, in a transaction during which none of them is cancelled."""
    gated = _gates(events, all_gated)
    if not gated:
        yield events
        return
    async with connection.transaction():
        closed = {record["id"] for record in await connection.fetch(queries.CLOSED, gated)}
        if closed:
            _refuse({one.execution_id for one in events if one.event_type in DRIVING} & closed)
            events = [
                one for one in events if one.execution_id not in closed or not (all_gated or one.event_type in GATED)
            ]
        yield events


def _refuse(closed: Collection[int]) -> None:
    if closed:
        names = ", ".join(map(str, sorted(closed)))
        raise ExecutionCancelledError(f"execution {names} was cancelled: it issues no commands and ends no steps")


async def _insert_new(connection: Connection, events: Sequence[Event]) -> set[int]:
    if not events:
        return set()
    columns = [list(column) for column in zip(*map(as_row, events), strict=True)]
    return {record["event_id"] for record in await connection.fetch(queries.INSERT_NEW, *columns)}
