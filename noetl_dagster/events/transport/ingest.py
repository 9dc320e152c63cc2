"""The ingestor: moves worker events from the stream into the log, in batches of one transaction each.

It acknowledges messages after the commit. Any number of ingestors may run at once; they share one durable consumer.
Redelivery changes nothing, because events carry their own ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import nats.errors
import orjson
from nats.aio.msg import Msg
from pydantic_core import to_json

from noetl_dagster.errors import EventRefusedError
from noetl_dagster.events.connection import DATABASE_AWAY, REFUSED
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.base import BatchPause, note_refused
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.nats import (
    ACK_SECONDS,
    NatsClient,
    NatsNames,
    Sender,
    ensure_ingest_consumer,
    ensure_stream,
    subject_token,
)
from noetl_dagster.events.transport.wire import EventLimits, RefusedEvent, decode_message, message_of
from noetl_dagster.events.types import Event
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.process.retrying import RetryLimits, with_retries

T = TypeVar("T")
logger = logging.getLogger(__name__)

BATCH = 1_000
TRANSACTION_EVENTS = 2_000
"""Maximum of events in one transaction: a message may hold many."""

CONCURRENT_BATCHES = 2
"""Batches in progress at once: while one is being committed the next is fetched and decoded."""

REDELIVERY_SECONDS = (1.0, 5.0, 15.0, 30.0)
"""Pauses before a message that failed is delivered again; after the last one it becomes a dead letter."""

DATABASE_PATIENCE = RetryLimits(DATABASE_AWAY, final=REFUSED)

NO_RESPONDERS = "503"
AGAIN_SECONDS = 1.0
"""Pause while JetStream does not answer."""

REQUEST_SECONDS = 5.0
"""Duration of a request at the server; a request lost with its connection is repeated after it."""


class ConsumerGoneError(nats.errors.Error):
    """The stream or consumer no longer exists: it was deleted, or the server lost its files."""


class Pull:
    """A pull subscription that requests messages ahead, so that none waits for a request. One task may take from it.

    Args:
        ahead: messages that may be in transit or waiting here beyond the requested ones; no other subscriber
            receives these.
    """

    def __init__(self, client: NatsClient, stream: str, consumer: str, *, ahead: int) -> None:
        self._client = client
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._ahead = ahead
        self._inbox = client.new_inbox()
        self._waiting: deque[Msg] = deque()
        self._credit = 0
        self._expires = 0.0
        self._arrived = asyncio.Event()
        self._gone = False
        self._subscription: object | None = None

    async def open(self) -> None:
        """Subscribes."""
        self._subscription = await self._client.subscribe(self._inbox, cb=self._receive)

    async def take(self, limit: int, patience: float) -> list[Msg]:
        """Returns up to ``limit`` messages as soon as there is one; none after ``patience`` seconds.

        Raises:
            ConsumerGoneError: the consumer must be created again; messages delivered before are returned first.
        """
        deadline = asyncio.get_running_loop().time() + patience
        while not self._waiting:
            if self._gone:
                self._gone = False
                raise ConsumerGoneError
            await self._ask(limit)
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return []
            self._arrived.clear()
            try:
                async with asyncio.timeout(remaining):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        count = min(limit, len(self._waiting))
        # asks before it takes: messages that were taken would be lost if this is cancelled
        await self._ask(limit, taken=count)
        return [self._waiting.popleft() for _ in range(count)]

    async def close(self) -> list[Msg]:
        """Ends the subscription and returns the messages that were not taken."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()  # type: ignore[attr-defined]
        left = list(self._waiting)
        self._waiting.clear()
        return left

    async def _ask(self, limit: int, taken: int = 0) -> None:
        """Requests more unless enough messages are in transit, when ``taken`` of those that wait are taken."""
        now = asyncio.get_running_loop().time()
        if self._credit > 0 and now > self._expires:
            self._credit = 0
        waiting = len(self._waiting) - taken
        room = limit + self._ahead - self._credit - waiting
        if room <= self._ahead // 2 and (self._credit or waiting):  # a request for each message costs too
            return
        self._credit += room
        self._expires = now + REQUEST_SECONDS + 1.0
        body = {"batch": room, "expires": int(REQUEST_SECONDS * 1e9)}
        await self._client.publish(self._request, orjson.dumps(body), reply=self._inbox)

    async def _receive(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status") if not message.data else None
        if status is None:
            self._credit -= 1
            self._waiting.append(message)
        elif status != "100":  # the request is over: expired, or the consumer is not there
            left = headers.get("Nats-Pending-Messages")
            self._credit = max(self._credit - int(left), 0) if left else 0
            self._gone = status == NO_RESPONDERS or "Deleted" in headers.get("Description", "")
        self._arrived.set()


@dataclass(slots=True)
class IngestReport:
    """The counts of an ingestor's work."""

    events: int = 0
    duplicates: int = 0
    refused: int = 0
    batches: int = 0
    dead_letters: int = 0
    delayed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.events} events in {self.batches} batches ({self.seconds:.2f} s)"
        for count, what in ((self.duplicates, "known already"),
                            (self.refused, "from workers that do not hold the commands"),
                            (self.delayed, "to be tried again"),
                            (self.dead_letters, "stored in noetl.dead_letter")):  # fmt: skip
            text += f", {count} {what}" if count else ""
        return text


@dataclass(slots=True)
class _Delivery:
    """A message with ``size`` events.

    Attributes:
        later: seconds until it is to be delivered again, if one of its events cannot be ingested now.
        dead: how many of its events became dead letters.
    """

    message: Msg
    stored: datetime
    size: int
    later: float | None = None
    dead: int = 0


class _DeliveredEvent(NamedTuple):
    """An event of a message, and the sender's pool, which the message's subject names."""

    delivery: _Delivery
    position: int
    event: Event
    pool: str


class Ingestor:
    """Moves events from ``NOETL_WORKER_EVENTS`` into the log.

    Args:
        redelivery: pauses in seconds before each new delivery of a message that failed.
        observe: called after each commit with the numbers of new and of known events, and with the seconds from the
            stream's time stamp to the commit for each event.

    Attributes:
        active_at: when it last fetched, or failed at the database; monotonic.
    """

    def __init__(
        self,
        client: NatsClient,
        handler: EventHandler,
        *,
        batch: int = BATCH,
        redelivery: Sequence[float] = REDELIVERY_SECONDS,
        observe: Callable[[int, int, Sequence[float]], None] | None = None,
    ) -> None:
        self._client = client
        self._handler = handler
        self._names = client.names
        self._limits = EventLimits.of(client.settings)
        self._batch = batch
        self._redelivery = tuple(redelivery)
        self._observe = observe
        self._pull = Pull(client, self._names.event_stream, self._names.ingest_consumer, ahead=2 * batch)
        self._taking = asyncio.Lock()
        self._pace = BatchPause()
        self._is_answered = True
        self.total = IngestReport()
        self.active_at = time.monotonic()

    async def open(self) -> list[str]:
        """Creates a missing stream or consumer; returns a line for each setting of theirs that differs."""
        differences = await self._ensure()
        await self._pull.open()
        return differences

    async def _ensure(self) -> list[str]:
        stream = self._client.jetstream()
        differences = await ensure_stream(stream, self._names)
        await ensure_ingest_consumer(stream, self._names)
        return differences

    async def run(self, stop: asyncio.Event) -> None:
        """Ingests until ``stop`` is set, through any outage of either server."""
        await self._ingest_while(lambda: self._take_or_stop(stop))

    async def _restore(self) -> None:
        """Creates stream and consumer again, unless a cluster has no leader for them now."""
        try:
            await asyncio.sleep(0.2)
            await self._ensure()
        except (nats.errors.Error, OSError) as error:
            if self._is_answered:
                logger.warning("JetStream does not answer: %r; trying again", error)
            self._is_answered = False
            await asyncio.sleep(AGAIN_SECONDS)
        else:
            logger.warning("the stream of worker events was gone or without a leader; it is there again")
            self._is_answered = True

    async def drain(self, *, most_seconds: float = 30.0, quiet_seconds: float = 0.2) -> IngestReport:
        """Ingests until the stream has been empty for a moment; returns the counts."""
        before, started = self.total, time.monotonic()
        self.total = IngestReport()

        async def take() -> list[Msg] | None:
            if time.monotonic() - started < most_seconds:
                with contextlib.suppress(ConsumerGoneError):
                    return await self._pull.take(self._batch, quiet_seconds) or None
            return None

        await self._ingest_while(take)
        done, self.total = self.total, before
        done.seconds = time.monotonic() - started
        for name in ("events", "duplicates", "refused", "batches", "dead_letters", "delayed"):
            setattr(before, name, getattr(before, name) + getattr(done, name))
        return done

    async def close(self) -> None:
        """Returns delivered messages that it has not processed, for immediate redelivery."""
        with contextlib.suppress(Exception):
            for message in await self._pull.close():
                await message.nak()
            await self._client.flush(timeout=2)

    async def _ingest_while(self, take: Callable[[], Awaitable[list[Msg] | None]]) -> None:
        """Ingests what ``take`` returns, until that is None."""

        async def work() -> None:
            while True:
                async with self._taking:
                    await asyncio.sleep(self._pace.pause)
                    messages = await take()
                    self._pace.begin()
                if messages is None:
                    return
                self.active_at = time.monotonic()
                for message in messages:
                    self._pace.note(message.subject.rsplit(".", 2)[0])  # without execution and type
                await self._ingest(messages)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_BATCHES):
                group.create_task(work())

    async def _take_or_stop(self, stop: asyncio.Event) -> list[Msg] | None:
        if stop.is_set():
            return None
        taking = asyncio.ensure_future(self._pull.take(self._batch, 1.0))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and not taking.done():
                taking.cancel()
                return []
            return await taking
        except ConsumerGoneError:
            await self._restore()
        except (OSError, RuntimeError) as error:  # reconnecting
            logger.debug("taking events: %r", error)
            await asyncio.sleep(0.2)
        finally:
            stopping.cancel()
        return []

    async def _ingest(self, messages: list[Msg]) -> None:
        try:
            await self._ingest_all(messages)
        except (nats.errors.Error, OSError) as error:  # unacknowledged messages are delivered again
            logger.debug("acknowledging events: %r", error)
        except Exception:  # a defect must not end a service that looks alive
            if len(messages) > 1:  # one message must not hold up the others at each delivery
                for message in messages:
                    await self._ingest([message])
                return
            logger.exception("a message of events cannot be ingested now; it is delivered again")
            with contextlib.suppress(nats.errors.Error, OSError, nats.errors.MsgAlreadyAckdError):
                await messages[0].nak(delay=self._redelivery[-1])

    async def _ingest_all(self, messages: list[Msg]) -> None:
        deliveries, entries = [], []
        for message in messages:
            stored = _stored(message)
            try:
                pool, events = read_message(self._names, message.subject, message.data, stored, self._limits)
            except EventRefusedError as error:
                pool, events = "", [RefusedEvent(0, message.data, str(error))]
            delivery = _Delivery(message, stored, len(events))
            deliveries.append(delivery)
            for position, one in enumerate(events):
                if isinstance(one, RefusedEvent):
                    await self._put_dead_letter(delivery, position, one.content, one.reason)
                else:
                    entries.append(_DeliveredEvent(delivery, position, one, pool))
        if entries:
            await self._take(entries, messages)
            self.total.batches += 1
        for delivery in deliveries:
            if delivery.later is not None:
                self.total.delayed += 1
                await delivery.message.nak(delay=delivery.later)
            elif delivery.dead == delivery.size:
                await delivery.message.term()
            else:
                await delivery.message.ack()

    async def _take(self, entries: list[_DeliveredEvent], messages: list[Msg]) -> None:
        unknown = await self._patiently(
            lambda: self._handler.unknown_executions({entry.event.execution_id for entry in entries}),
            messages,
        )
        for entry in entries:
            if entry.event.execution_id in unknown:
                await self._retry_later(entry, f"no execution {entry.event.execution_id} in the event log")
        by_pool: dict[str, list[_DeliveredEvent]] = {}
        for entry in entries:
            if entry.event.execution_id not in unknown:
                by_pool.setdefault(entry.pool, []).append(entry)
        for of_pool in by_pool.values():
            for begin in range(0, len(of_pool), TRANSACTION_EVENTS):
                await self._append(of_pool[begin : begin + TRANSACTION_EVENTS], messages)

    async def _append(self, entries: list[_DeliveredEvent], messages: list[Msg]) -> None:
        """Appends events of one pool; if the log refuses a batch, halving it finds the faulty event."""
        events, pools = [entry.event for entry in entries], (entries[0].pool,)
        try:
            taken = await self._patiently(lambda: self._handler.take_events(events, pools), messages)
        except REFUSED as error:
            if len(entries) == 1:
                await self._retry_later(entries[0], f"{type(error).__name__}: {error}")
                return
            middle = len(entries) // 2
            await self._append(entries[:middle], messages)
            await self._append(entries[middle:], messages)
            return
        committed = datetime.now(UTC)
        note_refused(events, taken.refused)
        new, refused = len(taken.new), len(taken.refused)
        duplicates = len(events) - new - refused
        self.total.refused += refused
        self.total.events += new
        self.total.duplicates += duplicates
        if self._observe is not None:
            delays = [(committed - entry.delivery.stored).total_seconds() for entry in entries]
            self._observe(new, duplicates, delays)

    async def _retry_later(self, entry: _DeliveredEvent, error: str) -> None:
        delivery = entry.delivery
        delivered = delivery.message.metadata.num_delivered
        if delivered > len(self._redelivery):
            content = delivery.message.data if delivery.size == 1 else to_json(message_of(entry.event))
            await self._put_dead_letter(delivery, entry.position, content, error)
        else:
            delivery.later = self._redelivery[delivered - 1]

    async def _put_dead_letter(self, delivery: _Delivery, position: int, content: bytes, error: str) -> None:
        """Stores an event that will never be ingested in ``noetl.dead_letter``."""
        message, metadata = delivery.message, delivery.message.metadata
        # with its time: a stream that is created again counts from one
        name = f"{metadata.sequence.stream}@{delivery.stored.isoformat()}"
        if delivery.size > 1:
            name = f"{name}/{position}"
        logger.error("event message %s of %s is stored in noetl.dead_letter: %s", name, message.subject, error)
        error, content = SECRETS.redact(error), SECRETS.redact_bytes(content)
        row = (self._names.event_stream, message.subject, content, error, metadata.num_delivered, name)
        await self._patiently(lambda: self._handler.log.pool.execute(queries.PUT_DEAD_LETTER, *row), [message])
        delivery.dead += 1
        self.total.dead_letters += 1

    async def _patiently(self, work: Callable[[], Awaitable[T]], messages: list[Msg]) -> T:
        """Repeats database work while the database is unavailable, and keeps NATS from redelivering meanwhile."""
        reported = time.monotonic()

        async def note(error: BaseException, pause: float) -> None:
            nonlocal reported
            self.active_at = time.monotonic()
            logger.warning("the event log accepts no events: %s; trying again in %.2g s", error, pause)
            if time.monotonic() - reported > ACK_SECONDS / 3:
                reported = time.monotonic()
                for message in messages:
                    await message.in_progress()

        return await with_retries(work, DATABASE_PATIENCE, on_failure=note)


def read_message(
    names: NatsNames, subject: str, content: bytes, stored: datetime, limits: EventLimits
) -> tuple[str, list[Event | RefusedEvent]]:
    """Returns the pool that a message's subject names, and its events, each of which may be refused.

    Args:
        stored: when the stream stored the message.

    Raises:
        EventRefusedError: the message as a whole is not valid.
    """
    sender = names.sender(subject)
    return sender.pool, _sent_by(sender, decode_message(content, stored, limits), content)


def _sent_by(sender: Sender, events: list[Event | RefusedEvent], content: bytes) -> list[Event | RefusedEvent]:
    """Returns the events of a message; those that name another worker than its subject are refused."""
    checked: list[Event | RefusedEvent] = []
    for position, one in enumerate(events):
        if isinstance(one, Event) and subject_token(one.worker_id or "") != sender.worker:
            reason = f"worker {sender.worker} of pool {sender.pool} sends an event of worker {one.worker_id!r:.300}"
            one = RefusedEvent(position, content if len(events) == 1 else to_json(message_of(one)), reason)
        checked.append(one)
    return checked


def _stored(message: Msg) -> datetime:
    """Returns when the stream stored a message; ``message.metadata`` has it too, at ten times the cost.

    The reply subject is ``$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<seq>.<nanoseconds>.<pending>``;
    servers with domains put a domain and an account before the stream (ADR-15 of NATS).
    """
    tokens = message.reply.split(".")
    nanoseconds = tokens[7] if len(tokens) == 9 else tokens[9]
    return datetime.fromtimestamp(int(nanoseconds) / 1e9, UTC)
