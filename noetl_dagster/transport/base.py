"""The transport seam: what a worker does with the events it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from noetl_dagster.events.types import Event, EventType

WORKER_EVENTS = frozenset(
    {
        EventType.COMMAND_COMPLETED,
        EventType.COMMAND_FAILED,
        EventType.COMMAND_HEARTBEAT,
        EventType.LOOP_SHARD_DONE,
        EventType.LOOP_SHARD_FAILED,
        EventType.CALL_PARTIAL,
    }
)
"""Events that a worker may emit. Everything else routes, and only the control plane routes."""


class EventTransport(Protocol):
    """Carries events to the log, in any order and possibly more than once: their ids make that harmless.

    Attributes:
        transactional: events can join the sender's own database transaction.
    """

    transactional: bool

    async def publish(self, events: Sequence[Event]) -> None:
        """Returns when the events are safe: in the log, or in the stream that leads there.

        Raises:
            TransportError: the receiver cannot be reached; sending again is safe.
            EventTooLargeError: an event is larger than the transport carries.
            EventRefusedError: the receiver will never take an event.
        """
        ...

    async def close(self) -> None:
        """Waits for what is under way and lets go of connections."""
        ...


class TransportOutlet:
    """A transport in the place of the event log, as :class:`noetl_dagster.events.buffer.EventBuffer` uses it."""

    def __init__(self, transport: EventTransport) -> None:
        self.transport = transport
        self.transactional = transport.transactional

    async def append(self, events: Sequence[Event], *, connection: Any = None) -> set[int]:
        """Sends the events; which of them the log had already is not known to a sender."""
        if connection is not None:
            await self.transport.publish_on(events, connection)  # type: ignore[attr-defined]
        else:
            await self.transport.publish(events)
        return {event.event_id for event in events}

    async def present(self, events: Sequence[Event]) -> set[int]:
        return {event.event_id for event in events}
