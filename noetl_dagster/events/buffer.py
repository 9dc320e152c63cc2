"""Group commit: events of many concurrent commands are appended in one statement."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from noetl_dagster.errors import RefusedEventError
from noetl_dagster.events.connection import DATABASE_AWAY, PATIENCE, REFUSED
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.base import Transport
from noetl_dagster.events.types import Event
from noetl_dagster.process.retrying import with_retries

EventWriter = EventLog | Transport

GROUP_EVENTS = 1000
"""Maximum number of events in a group commit: more would hold up those that wait for the first of them."""

LINGER_SECONDS = 0.005
"""Time that an event waits for others: a few times as long as a commit on a local disk."""


@dataclass(slots=True, eq=False)
class _BufferedEvents:
    events: Sequence[Event]
    done: asyncio.Future[set[int]] | None
    urgent: bool = False

    @property
    def executions(self) -> set[int]:
        return {event.execution_id for event in self.events}


class EventBuffer:
    """Collects events and appends them in batches. The events of one caller stay in order.

    While a batch is being written the next one fills up, so batches grow with the load; a single event is
    written at once. Posted events, which no caller awaits, wait a few milliseconds for others.

    Args:
        size: events per batch, at most (a single caller's events are never split).
        linger: seconds that a posted event waits for others.
    """

    def __init__(self, log: EventWriter, *, size: int = 500, linger: float = 0.005) -> None:
        self._log = log
        self._size = size
        self._linger = linger
        self._entries: deque[_BufferedEvents] = deque()
        self._pending = 0
        self._writer: asyncio.Task[None] | None = None
        self._urgent = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._landed = asyncio.Event()
        self._landed.set()
        self._failures: dict[int, BaseException] = {}

    @property
    def log(self) -> EventWriter:
        """The log behind the buffer, for events that join a transaction of the caller."""
        return self._log

    async def append(self, events: Sequence[Event]) -> set[int]:
        """Appends events and waits until they are committed; returns the ids of the new ones.

        Raises:
            RefusedEventError: the log cannot store an event of them, or one that was posted before.
        """
        if not events:
            return set()
        self._raise_failure(events[0].execution_id)
        if self._is_idle:
            self._landed.clear()
            try:
                return await self._append(list(events))
            finally:
                self._landed.set()
        return await self.begin(events)

    def begin(self, events: Sequence[Event], *, urgent: bool = True) -> asyncio.Future[set[int]]:
        """Adds events. The future has the ids of the new ones; unless it is ``urgent``, they wait for others."""
        future: asyncio.Future[set[int]] = asyncio.get_running_loop().create_future()
        self._push(_BufferedEvents(events, future, urgent))
        if urgent:
            self._urgent.set()
        return future

    def withdraw(self, begun: asyncio.Future[set[int]]) -> bool:
        """Removes events that :meth:`begin` has added, for a caller who writes them; False if that is too late."""
        for entry in self._entries:
            if entry.done is begun:
                self._entries.remove(entry)
                self._pending -= len(entry.events)
                begun.cancel()
                return True
        return False

    async def post(self, events: Sequence[Event]) -> None:
        """Adds events without waiting for the commit; waits only while the buffer is full.

        Raises the failure of events of the same execution that were posted before, and are not in the log.
        """
        self._raise_failure(events[0].execution_id)
        await self._room.wait()
        self._push(_BufferedEvents(events, None))

    def hurry(self) -> None:
        """Writes posted events without waiting for others."""
        if self._entries:
            self._urgent.set()

    async def flush(self, execution_id: int | None = None) -> None:
        """Waits until all events added so far are committed, not those added meanwhile.

        Args:
            execution_id: raises the failure of events of this execution, as :meth:`post`.
        """
        await self._landed.wait()
        if not self._is_idle:
            with suppress(Exception):  # the caller of those events gets it
                await self.begin(())
        if execution_id is not None:
            self._raise_failure(execution_id)

    @property
    def _is_idle(self) -> bool:
        """True if nothing waits and nothing is being written, so that an append need not use the writer."""
        return not self._entries and self._landed.is_set() and (self._writer is None or self._writer.done())

    def _push(self, entry: _BufferedEvents) -> None:
        self._entries.append(entry)
        self._pending += len(entry.events)
        if self._pending >= self._size:
            self._urgent.set()
        if self._pending >= 20 * self._size:
            self._room.clear()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def _raise_failure(self, execution_id: int) -> None:
        if self._failures and (failure := self._failures.pop(execution_id, None)) is not None:
            raise failure

    async def _write(self) -> None:
        while self._entries:
            if not self._urgent.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), self._linger)
            self._urgent.clear()
            batch = self._take()
            if not batch:  # all have been withdrawn
                return
            try:
                await self._commit(batch)
            except asyncio.CancelledError as error:
                self._fail([*batch, *self._entries], error)
                raise

    async def _commit(self, batch: list[_BufferedEvents]) -> None:
        """Appends a batch; if the log refuses it, each entry alone, so that one affects no other execution.

        What follows a refused event of the same execution is refused as well.
        """
        events = [event for entry in batch for event in entry.events]
        try:
            inserted = await self._append(events) if events else set()
        except Exception as error:
            if len(batch) == 1 or isinstance(error, DATABASE_AWAY):
                self._fail(batch, error)
            else:
                for entry in batch:
                    earlier = [self._failures[one] for one in entry.executions if one in self._failures]
                    if entry.done is not None and earlier:
                        self._fail([entry], earlier[0])
                    else:
                        await self._commit([entry])
            return
        for entry in batch:
            if entry.done is not None and not entry.done.done():
                entry.done.set_result({e.event_id for e in entry.events if e.event_id in inserted})

    def _take(self) -> list[_BufferedEvents]:
        batch: list[_BufferedEvents] = []
        count = 0
        while self._entries and (not batch or count + len(self._entries[0].events) <= self._size):
            entry = self._entries.popleft()
            batch.append(entry)
            count += len(entry.events)
        self._pending -= count
        if self._pending < 20 * self._size:
            self._room.set()
        if any(entry.urgent for entry in self._entries) or self._pending >= self._size:
            self._urgent.set()
        return batch

    def _fail(self, batch: list[_BufferedEvents], error: BaseException) -> None:
        for entry in batch:
            if entry.done is None:
                self._failures |= dict.fromkeys(entry.executions, error)
            elif not entry.done.done():
                for execution_id in entry.executions:
                    self._failures.pop(execution_id, None)
                entry.done.set_exception(error)

    async def _append(self, events: list[Event]) -> set[int]:
        broken = False

        async def append() -> set[int]:
            nonlocal broken
            try:
                inserted = await self._log.append(events)
                # The commit may have succeeded although its answer was lost: those events are new, too.
                return inserted | await self._log.present(events) if broken else inserted
            except DATABASE_AWAY:
                broken = True
                raise

        try:
            return await with_retries(append, PATIENCE)
        except REFUSED as error:
            names = sorted({f"{event.event_type} of {event.node_name}" for event in events})
            reason = getattr(error, "message", None) or error  # without the details of PostgreSQL, which show the row
            raise RefusedEventError(f"the event log cannot store {', '.join(names)}: {reason}") from error
