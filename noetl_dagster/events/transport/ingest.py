"""From the stream of worker events into the log: batches, one transaction each, acknowledged after the commit.

Any number of ingestors may run at once; they share one durable consumer. What is delivered again changes
nothing, because events carry their own ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import asyncpg
import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pydantic_core import to_json

from noetl_dagster.errors import EventRefusedError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.intake import EventIntake
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.nats.pull import ConsumerGoneError, Pull
from noetl_dagster.events.transport.nats.streams import ACK_SECONDS, ensure_ingest_consumer, ensure_streams
from noetl_dagster.events.transport.wire import Refused, decode_message, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)

BATCH = 1_000
PART = 2_000
"""Events of one transaction: a message may hold many."""

LANES = 2
"""Batches on their way at once: while one is being committed the next is taken and decoded."""

POISON = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
"""Failures that lie in an event itself; every other failure of the database is waited out."""

REDELIVERY_SECONDS = (1.0, 5.0, 15.0, 30.0)
"""Pauses before a message that failed is delivered again; after the last one it is put aside."""

DATABASE_PATIENCE = RetryLimits(DATABASE_AWAY, final=POISON)


@dataclass(slots=True)
class IngestReport:
    """What an ingestor did."""

    events: int = 0
    duplicates: int = 0
    batches: int = 0
    put_aside: int = 0
    put_off: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.events} events in {self.batches} batches ({self.seconds:.2f} s)"
        for count, what in ((self.duplicates, "known already"), (self.put_off, "to be tried again"),
                            (self.put_aside, "put aside in noetl.dead_letter")):  # fmt: skip
            text += f", {count} {what}" if count else ""
        return text


@dataclass(slots=True)
class _Parcel:
    """A message with one event or more.

    Attributes:
        later: seconds after which it is to be delivered again, because of an event that cannot be taken now.
        aside: how many of its events were put aside.
    """

    message: Msg
    stored: datetime
    size: int
    later: float | None = None
    aside: int = 0


class _Entry(NamedTuple):
    parcel: _Parcel
    place: int
    event: Event


class Ingestor:
    """Moves events from ``NOETL_WORKER_EVENTS`` into the log.

    Args:
        redelivery: pauses in seconds before each new delivery of a message that failed.
        observe: told of each commit: how many events were new and how many known already, and of each event
            the seconds from the stream's time stamp to the commit.

    Attributes:
        turned: when a batch, or none, was last taken, or the database last said that it cannot; monotonic.
    """

    def __init__(
        self,
        client: NatsClient,
        intake: EventIntake,
        settings: Settings,
        *,
        batch: int = BATCH,
        redelivery: Sequence[float] = REDELIVERY_SECONDS,
        observe: Callable[[int, int, Sequence[float]], None] | None = None,
    ) -> None:
        self._client = client
        self._intake = intake
        self._settings = settings
        self._names = Names.of(settings)
        self._batch = batch
        self._redelivery = tuple(redelivery)
        self._observe = observe
        self._pull: Pull | None = None
        self._taking = asyncio.Lock()
        self.total = IngestReport()
        self.turned = time.monotonic()

    async def open(self) -> list[str]:
        """Makes stream and consumer where they are missing; returns settings of theirs that differ."""
        differences = await self._furnish()
        self._pull = Pull(
            self._client, self._names.event_stream, self._names.ingest_consumer, ahead=2 * self._batch
        )
        await self._pull.open()
        return differences

    async def _furnish(self) -> list[str]:
        stream = self._client.jetstream()
        differences = await ensure_streams(stream, self._settings)
        await ensure_ingest_consumer(stream, self._names)
        return differences

    async def run(self, stop: asyncio.Event) -> None:
        """Ingests until ``stop`` is set, through any outage of either server."""
        assert self._pull is not None, "open() the ingestor first"
        pull = self._pull

        async def lane() -> None:
            while True:
                async with self._taking:
                    if stop.is_set():
                        return
                    messages = await self._take_or_stop(pull, stop)
                self.turned = time.monotonic()
                await self._ingest(messages)

        await self._in_lanes(lane)

    async def drain(self, *, most_seconds: float = 30.0, quiet_seconds: float = 0.2) -> IngestReport:
        """Ingests what is there until the stream has been quiet for a moment; returns what was done."""
        assert self._pull is not None, "open() the ingestor first"
        pull, before, started = self._pull, self.total, time.monotonic()
        self.total = IngestReport()

        async def lane() -> None:
            while time.monotonic() - started < most_seconds:
                messages: list[Msg] = []
                async with self._taking:
                    with contextlib.suppress(ConsumerGoneError):
                        messages = await pull.take(self._batch, quiet_seconds)
                if not messages:
                    break
                await self._ingest(messages)

        await self._in_lanes(lane)
        done, self.total = self.total, before
        done.seconds = time.monotonic() - started
        for name in ("events", "duplicates", "batches", "put_aside", "put_off"):
            setattr(before, name, getattr(before, name) + getattr(done, name))
        return done

    async def close(self) -> None:
        """Gives back at once what was delivered and not taken."""
        if self._pull is not None:
            with contextlib.suppress(Exception):
                for message in await self._pull.close():
                    await message.nak()
                await self._client.flush(timeout=2)

    @staticmethod
    async def _in_lanes(lane: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(lane())

    async def _take_or_stop(self, pull: Pull, stop: asyncio.Event) -> list[Msg]:
        taking = asyncio.ensure_future(pull.take(self._batch, 1.0))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
            return await taking
        except ConsumerGoneError:
            logger.warning("stream or consumer of worker events are gone; making them anew")
            await asyncio.sleep(0.2)
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._furnish()
            return []
        except (OSError, RuntimeError) as error:  # the connection is being made anew
            logger.debug("taking events: %r", error)
            await asyncio.sleep(0.2)
            return []
        finally:
            stopping.cancel()

    async def _ingest(self, messages: list[Msg]) -> None:
        try:
            await self._ingest_all(messages)
        except (nats.errors.Error, OSError) as error:  # what is not acknowledged comes again
            logger.debug("acknowledging events: %r", error)
        except Exception:  # a defect must not end a service that looks alive
            if len(messages) > 1:  # nor may one message hold up its neighbours each time that it comes
                for message in messages:
                    await self._ingest([message])
                return
            logger.exception("a message of events cannot be taken now; it comes again")
            with contextlib.suppress(nats.errors.Error, OSError, nats.errors.MsgAlreadyAckdError):
                await messages[0].nak(delay=self._redelivery[-1])

    async def _ingest_all(self, messages: list[Msg]) -> None:
        parcels, entries = [], []
        for message in messages:
            stored = _stored(message)
            try:
                events = decode_message(message.data, stored)
            except EventRefusedError as error:
                events = [Refused(0, message.data, str(error))]
            parcel = _Parcel(message, stored, len(events))
            parcels.append(parcel)
            for place, one in enumerate(events):
                if isinstance(one, Refused):
                    await self._put_aside(parcel, place, one.content, one.reason)
                else:
                    entries.append(_Entry(parcel, place, one))
        if entries:
            await self._take(entries, messages)
            self.total.batches += 1
        for parcel in parcels:
            await self._settle(parcel)

    async def _take(self, entries: list[_Entry], messages: list[Msg]) -> None:
        unknown = await self._patiently(
            lambda: self._intake.unknown_executions({entry.event.execution_id for entry in entries}), messages
        )
        for entry in entries:
            if entry.event.execution_id in unknown:
                await self._retry_later(entry, f"no execution {entry.event.execution_id} in the event log")
        known = [entry for entry in entries if entry.event.execution_id not in unknown]
        for begin in range(0, len(known), PART):
            await self._append(known[begin : begin + PART], messages)

    async def _append(self, entries: list[_Entry], messages: list[Msg]) -> None:
        """Appends events; of a batch that the log refuses, the guilty event is found by halving."""
        events = [entry.event for entry in entries]
        try:
            inserted = await self._patiently(lambda: self._intake.handle_events(events), messages)
        except POISON as error:
            if len(entries) == 1:
                await self._retry_later(entries[0], f"{type(error).__name__}: {error}")
                return
            middle = len(entries) // 2
            await self._append(entries[:middle], messages)
            await self._append(entries[middle:], messages)
            return
        committed = datetime.now(UTC)
        new, known = len(inserted), len(events) - len(inserted)
        self.total.events += new
        self.total.duplicates += known
        if self._observe is not None:
            delays = [(committed - entry.parcel.stored).total_seconds() for entry in entries]
            self._observe(new, known, delays)

    async def _settle(self, parcel: _Parcel) -> None:
        """Acknowledges a message whose events are all in the log or put aside; asks for any other again."""
        if parcel.later is not None:
            self.total.put_off += 1
            await parcel.message.nak(delay=parcel.later)
        elif parcel.aside == parcel.size:
            await parcel.message.term()
        else:
            await parcel.message.ack()

    async def _retry_later(self, entry: _Entry, error: str) -> None:
        parcel = entry.parcel
        delivered = parcel.message.metadata.num_delivered
        if delivered > len(self._redelivery):
            content = parcel.message.data if parcel.size == 1 else to_json(message_of(entry.event))
            await self._put_aside(parcel, entry.place, content, error)
        else:
            parcel.later = self._redelivery[delivered - 1]

    async def _put_aside(self, parcel: _Parcel, place: int, content: bytes, error: str) -> None:
        """Keeps a hopeless event in ``noetl.dead_letter``."""
        message, metadata = parcel.message, parcel.message.metadata
        # with its time: a stream that is made anew counts from one again
        name = f"{metadata.sequence.stream}@{parcel.stored.isoformat()}"
        if parcel.size > 1:
            name = f"{name}/{place}"
        logger.error("event message %s of %s is put aside: %s", name, message.subject, error)
        row = (self._names.event_stream, message.subject, content, error, metadata.num_delivered, name)
        await self._patiently(lambda: self._intake.log.pool.execute(queries.PUT_DEAD_LETTER, *row), [message])
        parcel.aside += 1
        self.total.put_aside += 1

    async def _patiently(self, work: Callable[[], Awaitable[T]], messages: list[Msg]) -> T:
        """Does database work again and again while the database is away; tells NATS that we are at it."""
        told = time.monotonic()

        async def note(error: BaseException, pause: float) -> None:
            nonlocal told
            self.turned = time.monotonic()
            logger.warning("the event log does not take events: %s; trying again in %.2g s", error, pause)
            if time.monotonic() - told > ACK_SECONDS / 3:
                told = time.monotonic()
                for message in messages:
                    await message.in_progress()

        return await with_retries(work, DATABASE_PATIENCE, on_failure=note)


def _stored(message: Msg) -> datetime:
    """When the stream stored a message. ``message.metadata`` says it too, at ten times the cost.

    The subject to answer to is ``$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<seq>.<nanoseconds>.<pending>``;
    servers with domains put a domain and an account before the stream (ADR-15 of NATS).
    """
    tokens = message.reply.split(".")
    nanoseconds = tokens[7] if len(tokens) == 9 else tokens[9]
    return datetime.fromtimestamp(int(nanoseconds) / 1e9, UTC)
