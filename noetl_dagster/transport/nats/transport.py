"""The transport over JetStream: events are safe as soon as the stream has confirmed them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient

from noetl_dagster.errors import EventTooLargeError, TransportError
from noetl_dagster.events.types import Event
from noetl_dagster.retrying import Patience, patiently
from noetl_dagster.transport.base import EventTransport
from noetl_dagster.transport.nats.names import Names
from noetl_dagster.transport.nats.streams import EVENT_BYTES
from noetl_dagster.transport.wire import encode_event

HEADER_BYTES = 512
"""What a message's own headers may add to its payload."""

MESSAGE_ID = "Nats-Msg-Id"
CONFIRM_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 2.0


class NatsTransport:
    """Publishes each event under ``noetl.events.<execution id>.<event type>`` and waits for the confirmations.

    Args:
        large: transport of events above the stream's message limit; without one they are refused.
        patience: seconds for which an unreachable server is tried again.
    """

    transactional = False

    def __init__(
        self,
        client: NatsClient,
        names: Names,
        *,
        large: EventTransport | None = None,
        patience: float = 300.0,
    ) -> None:
        self._stream = client.jetstream(publish_async_max_pending=4_000)
        self._names = names
        self._large = large
        self._patience = Patience((TransportError,), seconds=patience, longest_pause=LONGEST_PAUSE_SECONDS)
        self._first = asyncio.Lock()  # nats-py sets up its inbox of confirmations on first use, unguarded
        self._used = False

    async def publish(self, events: Sequence[Event]) -> None:
        waiting, oversize = [], []
        for event in events:
            content = encode_event(event)
            if len(content) + HEADER_BYTES > EVENT_BYTES:
                oversize.append(event)
            else:
                waiting.append((event, content))
        if oversize:
            await self._publish_large(oversize)

        async def confirm() -> None:
            nonlocal waiting
            waiting, error = await self._attempt(waiting)
            if waiting:
                raise TransportError(f"NATS did not confirm {len(waiting)} events: {error!r}") from error

        if waiting:
            await patiently(confirm, self._patience)

    async def close(self) -> None:
        if self._large is not None:
            await self._large.close()

    async def _attempt(
        self, waiting: list[tuple[Event, bytes]]
    ) -> tuple[list[tuple[Event, bytes]], BaseException | None]:
        """Publishes all at once; returns those that were not confirmed, and why."""
        futures = []
        error: BaseException | None = None
        async with contextlib.nullcontext() if self._used else self._first:
            for event, content in waiting:
                try:
                    futures.append(
                        await self._stream.publish_async(
                            self._names.event_subject(event.execution_id, event.event_type),
                            content,
                            wait_stall=CONFIRM_SECONDS,
                            headers={MESSAGE_ID: str(event.event_id)},
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

    async def _publish_large(self, events: list[Event]) -> None:
        if self._large is None:
            first = events[0]
            raise EventTooLargeError(
                f"event {first.event_type} of step {first.node_name} is larger than the {EVENT_BYTES} bytes of a "
                "NATS message; store the result, or let large events go over HTTP (NOETL_SERVER_URL)"
            )
        await self._large.publish(events)
