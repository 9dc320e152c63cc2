"""The interface of a transport."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from noetl_dagster.errors import EventRefusedError, EventTooLargeError
from noetl_dagster.events.envelopes import error_envelope, to_result
from noetl_dagster.events.types import COMMAND_ENDS, SHARD_ENDS, Event, EventType

logger = logging.getLogger(__name__)

WORKER_EVENTS = COMMAND_ENDS | {EventType.COMMAND_HEARTBEAT, EventType.CALL_PARTIAL}
"""Events that a worker may emit. All others route, and only the control plane routes."""

PAUSE_SECONDS = 0.001
MOST_PAUSE_SECONDS = 0.1
"""Pause between two batches for each sender, and at most."""

SENDER_SECONDS = 1.0
"""Time for which a sender counts, and once more as long."""


class Transport(ABC):
    """Carries events to the log, in any order and possibly more than once: their ids make that harmless.

    It takes the place of the event log behind an event buffer. If it cannot carry the end of a command, because that
    is too large or malformed, it sends a failure that reports this: no command stays without an end.

    Attributes:
        transactional: events can join a database transaction of the sender.
    """

    transactional = False

    @abstractmethod
    async def publish(self, events: Sequence[Event]) -> None:
        """Sends events and returns when they are safe: in the log, or in the stream that leads to it.

        Raises:
            TransportError: the receiver cannot be reached; sending again is safe.
            EventTooLargeError: an event is larger than the transport carries.
            EventRefusedError: the receiver will never take an event.
        """

    async def append(self, events: Sequence[Event], *, connection: Any = None, gated: bool = False) -> set[int]:
        """Sends events and returns their ids.

        ``gated`` changes nothing here: the sender holds a lease of its command, which ends with the execution.
        """
        try:
            await self.publish(events)
        except (EventTooLargeError, EventRefusedError):
            for event in events:
                await self._publish_or_replace(event)
        return {event.event_id for event in events}

    async def _publish_or_replace(self, event: Event) -> None:
        try:
            await self.publish([event])
        except (EventTooLargeError, EventRefusedError) as error:
            logger.error("event %s of step %s cannot be sent: %s", event.event_type, event.node_name, error)
            if event.event_type in COMMAND_ENDS:
                await self.publish([_failure(event, error)])

    async def present(self, events: Sequence[Event]) -> set[int]:
        """Returns the ids of all the events: a transport confirms only events that have arrived."""
        return {event.event_id for event in events}

    async def close(self) -> None:  # noqa: B027 - the direct transport has none
        """Closes connections."""


def note_refused(events: Sequence[Event], refused: Collection[int]) -> None:
    """Logs events that the log does not take, because this worker no longer holds their commands."""
    if not refused:
        return
    for event in events:
        if event.event_id in refused:
            logger.warning(
                "event %s of command %s is not taken: the command has ended, or another worker has claimed it",
                event.event_type,
                event.meta.get("command_id"),
            )


def _failure(event: Event, error: EventTooLargeError | EventRefusedError) -> Event:
    """Returns the failure that replaces an end of a command which cannot be sent."""
    shard = event.event_type in SHARD_ENDS
    meta = {name: value for name, value in event.meta.items() if name != "tasks"}
    return replace(
        event,
        event_type=EventType.LOOP_SHARD_FAILED if shard else EventType.COMMAND_FAILED,
        status="FAILED",
        meta={**meta, "final": True},
        context=None,
        result=to_result(error_envelope(error)),
        error=str(error)[:1_000],
        current_item=None,
    )


class BatchPause:
    """The pause between two batches, so that the requests of many senders share a statement.

    It is 1 ms for each sender of the last seconds, and at most 100 ms. A few senders hardly wait: they send as much as
    they have at once. After a quiet time, nothing waits.
    """

    def __init__(self) -> None:
        self._senders: set[str] = set()
        self._earlier = 0
        self._since = self._begun = float("-inf")

    def note(self, sender: str) -> None:
        """Counts a sender."""
        now = time.monotonic()
        if now - self._since > SENDER_SECONDS:
            self._earlier = len(self._senders) if now - self._since <= 2 * SENDER_SECONDS else 0
            self._senders.clear()
            self._since = now
        self._senders.add(sender)

    def begin(self) -> None:
        """Notes that a batch begins."""
        self._begun = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next batch should begin; 0 if now."""
        senders = max(len(self._senders), self._earlier)
        wait = min(senders * PAUSE_SECONDS, MOST_PAUSE_SECONDS)
        return max(self._begun + wait - time.monotonic(), 0.0)
