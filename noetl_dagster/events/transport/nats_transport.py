"""The transport over JetStream, where events are safe as soon as the stream has confirmed them; opens any transport.

Events of one execution that are published together share messages up to the stream's size limit, because a message
costs far more than an event in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import nats.errors
import nats.js.errors

from noetl_dagster.errors import EventTooLargeError, TransportError
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.base import Transport
from noetl_dagster.events.transport.handler import DirectTransport, EventHandler
from noetl_dagster.events.transport.http import ApiClient, HttpTransport
from noetl_dagster.events.transport.nats import BATCH_TYPE, EVENT_BYTES, NatsClient
from noetl_dagster.events.transport.wire import encode_batch, encode_event
from noetl_dagster.events.types import Event
from noetl_dagster.process import tracing
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import DEFAULT_POOL, EventTransport, Settings

HEADER_BYTES = 512
"""Maximum that a message's own headers add to its payload."""

MESSAGE_ID = "Nats-Msg-Id"
CONFIRM_SECONDS = 5.0
PATIENCE = RetryLimits((TransportError,), seconds=300.0, longest_pause=2.0)
"""Limits for publishing while the server is unreachable."""


class _Message(NamedTuple):
    """A message with the name by which the stream stores it only once, and the trace header of its first event."""

    subject: str
    name: str
    content: bytes
    trace: dict[str, str]


class NatsTransport(Transport):
    """Publishes events under ``noetl.events.<pool>.<worker id>.<execution id>.<type>`` and waits for the confirmations.

    The type of messages of several events is ``batch``. Events above the stream's message limit go over the transport
    ``large``, or are refused if there is none.

    Args:
        pool: the worker's.
    """

    def __init__(self, client: NatsClient, *, large: Transport | None = None, pool: str = DEFAULT_POOL) -> None:
        self._pool = pool
        self._stream = client.jetstream(publish_async_max_pending=4_000)
        self._names = client.names
        self._large = large
        self._first = asyncio.Lock()  # nats-py sets up its inbox of confirmations on first use, unguarded
        self._used = False

    async def publish(self, events: Sequence[Event]) -> None:
        """Publishes the events, repeatedly while the server is unavailable."""
        encoded, oversize = [], []
        for event in events:
            content = encode_event(event)
            if len(content) + HEADER_BYTES > EVENT_BYTES:
                oversize.append(event)
            else:
                encoded.append((event, content))
        if oversize:
            if self._large is None:
                first = oversize[0]
                raise EventTooLargeError(
                    f"event {first.event_type} of step {first.node_name} is larger than the {EVENT_BYTES} bytes of "
                    "a NATS message; store the result, or let large events go over HTTP (NOETL_SERVER_URL)"
                )
            await self._large.publish(oversize)
        waiting = list(self._messages(encoded))

        async def confirm() -> None:
            nonlocal waiting
            waiting, error = await self._attempt(waiting)
            if waiting:
                raise TransportError(f"NATS did not confirm {len(waiting)} messages: {error!r}") from error

        if waiting:
            await with_retries(confirm, PATIENCE)

    async def close(self) -> None:
        """Closes the transport for large events."""
        if self._large is not None:
            await self._large.close()

    def _messages(self, encoded: Iterable[tuple[Event, bytes]]) -> Iterator[_Message]:
        """Yields the events as messages; those of one execution stay in order."""
        by_execution: dict[int, list[tuple[Event, bytes]]] = {}
        for event, content in encoded:
            by_execution.setdefault(event.execution_id, []).append((event, content))
        for entries in by_execution.values():
            begin, size = 0, HEADER_BYTES
            for position, (_, content) in enumerate(entries):
                if position > begin and size + len(content) + 1 > EVENT_BYTES:
                    yield self._message(entries[begin:position])
                    begin, size = position, HEADER_BYTES
                size += len(content) + 1
            yield self._message(entries[begin:])

    def _message(self, entries: Sequence[tuple[Event, bytes]]) -> _Message:
        event, content = entries[0]
        carried = tracing.headers_about(event.execution_id, event.meta.get("command_id"))
        type_ = event.event_type if len(entries) == 1 else BATCH_TYPE
        subject = self._names.event_subject(self._pool, event.worker_id or "", event.execution_id, type_)
        if len(entries) == 1:
            return _Message(subject, str(event.event_id), content, carried)
        name = f"{event.event_id}+{len(entries) - 1}"
        return _Message(subject, name, encode_batch([content for _, content in entries]), carried)

    async def _attempt(self, waiting: list[_Message]) -> tuple[list[_Message], BaseException | None]:
        """Publishes all at once; returns the messages that were not confirmed, and the error."""
        futures = []
        error: BaseException | None = None
        async with contextlib.nullcontext() if self._used else self._first:
            for message in waiting:
                try:
                    futures.append(
                        await self._stream.publish_async(
                            message.subject,
                            message.content,
                            wait_stall=CONFIRM_SECONDS,
                            headers={MESSAGE_ID: message.name, **message.trace},
                        )
                    )
                except (nats.errors.Error, OSError) as failure:
                    error = failure
                    break
                self._used = True
        if futures:
            await asyncio.wait(futures, timeout=CONFIRM_SECONDS)
        unconfirmed = waiting[len(futures) :]
        for entry, future in zip(waiting, futures, strict=False):
            if not future.done():
                future.cancel()
                error = error or TimeoutError("no confirmation")
                unconfirmed.append(entry)
            elif future.exception() is not None:
                error = future.exception()
                unconfirmed.append(entry)
        return unconfirmed, error


def open_transport(settings: Settings, log: EventLog, client: NatsClient) -> Transport:
    """Opens the transport of ``NOETL_EVENT_TRANSPORT``; NATS sends events above the stream's limit over HTTP."""
    match settings.event_transport:
        case EventTransport.DIRECT:
            return DirectTransport(EventHandler(log, settings.command_heartbeat_timeout_seconds))
        case EventTransport.HTTP:
            return HttpTransport(ApiClient(settings))
        case EventTransport.NATS:
            return NatsTransport(client, large=HttpTransport(ApiClient(settings)), pool=settings.worker_pool)
