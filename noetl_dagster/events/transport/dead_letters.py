"""Dead letters: messages of workers that could not be ingested, and a second attempt at them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

import asyncpg

from noetl_dagster.errors import EventRefusedError
from noetl_dagster.events.connection import REFUSED
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import read_message
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.events.transport.wire import EventLimits, RefusedEvent
from noetl_dagster.events.types import Event
from noetl_dagster.process.redaction import SECRETS

PREVIEW_BYTES = 2_000

NOT_HELD = "the command has ended, was never issued, or another worker has claimed it"


class DeadLetter(NamedTuple):
    """A message that could not be ingested.

    Attributes:
        error: why the log did not take it the last time.
        size: bytes of its content.
        preview: the beginning of its content as text; U+FFFD replaces characters that cannot be shown.
    """

    id: int
    subject: str
    error: str
    deliveries: int
    created_at: datetime
    size: int
    preview: str


class Reprocessed(NamedTuple):
    """The outcome of another attempt. ``error``: why the letter is kept; None if the log has its events."""

    new: int
    known: int
    error: str | None = None


class _RefusedError(Exception):
    """The log takes none of a letter's events, for a reason."""


class DeadLetters:
    """Lists dead letters, and processes them again as the ingestor does."""

    def __init__(self, handler: EventHandler, names: NatsNames, limits: EventLimits) -> None:
        self._handler = handler
        self._pool = handler.log.pool
        self._names = names
        self._limits = limits

    async def newest(self, limit: int, *, before: int | None = None) -> list[DeadLetter]:
        """Returns letters, the newest first; only those with an id below ``before``."""
        rows = await self._pool.fetch(queries.DEAD_LETTERS, before, limit, PREVIEW_BYTES)
        return [_letter(row) for row in rows]

    async def find(self, letter_id: int) -> DeadLetter | None:
        """Returns a letter, None if there is none with this id."""
        letters = await self.newest(1, before=letter_id + 1)
        return letters[0] if letters and letters[0].id == letter_id else None

    async def count(self) -> int:
        """Returns how many there are."""
        return int(await self._pool.fetchval(queries.DEAD_LETTER_COUNT))

    async def reprocess(self, letter_id: int) -> Reprocessed | None:
        """Sends a letter to the log once more; None if there is no such letter.

        All its events are stored and the letter is deleted in one transaction, or the letter is kept with the new
        reason. Events that the log has already count as stored.
        """
        row = await self._pool.fetchrow(queries.DEAD_LETTER, letter_id)
        if row is None:
            return None
        try:
            pool, events = await self._read(row)
        except _RefusedError as error:
            return await self._keep(letter_id, str(error))
        async with self._pool.acquire() as connection, connection.transaction():
            if await connection.fetchval(queries.LOCK_DEAD_LETTER, letter_id) is None:
                return None  # another process was faster
            try:
                done = await self._take(events, pool, connection)
            except (_RefusedError, *REFUSED) as error:
                reason = str(error) if isinstance(error, _RefusedError) else f"{type(error).__name__}: {error}"
                return await self._keep(letter_id, reason, connection)
            await connection.execute(queries.DELETE_DEAD_LETTER, letter_id)
            return done

    async def _read(self, row: asyncpg.Record) -> tuple[str, list[Event]]:
        """Returns the sender's pool and the events of a letter.

        Raises:
            _RefusedError: the message is not valid, or the log does not have its execution.
        """
        try:
            pool, read = read_message(self._names, row["subject"] or "", row["payload"], _stored(row), self._limits)
        except EventRefusedError as error:
            raise _RefusedError(str(error)) from None
        refused = [one for one in read if isinstance(one, RefusedEvent)]
        if refused:
            raise _RefusedError(refused[0].reason)
        events = [one for one in read if isinstance(one, Event)]
        unknown = await self._handler.unknown_executions({event.execution_id for event in events})
        if unknown:
            raise _RefusedError(f"no execution {min(unknown)} in the event log")
        return pool, events

    async def _take(self, events: list[Event], pool: str, connection: asyncpg.Connection) -> Reprocessed:
        """Stores all events in a savepoint of the transaction, or raises and leaves the transaction as it was."""
        async with connection.transaction():
            taken = await self._handler.take_events(events, (pool,), connection=connection)
            if taken.refused:
                raise _RefusedError(NOT_HELD)
        return Reprocessed(len(taken.new), len(events) - len(taken.new))

    async def _keep(
        self, letter_id: int, reason: str, connection: asyncpg.Connection | None = None
    ) -> Reprocessed | None:
        reason = SECRETS.redact(reason)
        stored_id = await (connection or self._pool).fetchval(queries.KEEP_DEAD_LETTER, letter_id, reason)
        return None if stored_id is None else Reprocessed(0, 0, reason)


def _letter(row: asyncpg.Record) -> DeadLetter:
    return DeadLetter(
        id=row["dead_letter_id"],
        subject=_shown(row["subject"] or ""),
        error=_shown(row["error"]),
        deliveries=row["deliveries"],
        created_at=row["created_at"],
        size=row["size"],
        preview=_shown(row["preview"].decode("utf-8", "replace")),
    )


def _shown(text: str) -> str:
    """Returns text without secrets; U+FFFD replaces control characters and others that have no shape."""
    text = SECRETS.redact(text)
    return text if text.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in text)


def _stored(row: asyncpg.Record) -> datetime:
    """Returns when the stream stored the message, which its name contains: ``<sequence>@<time>[/<position>]``."""
    with suppress(ValueError):
        stored = datetime.fromisoformat((row["message_id"] or "").partition("@")[2].partition("/")[0])
        if stored.tzinfo is not None:
            return stored
    created: datetime = row["created_at"]
    return created
