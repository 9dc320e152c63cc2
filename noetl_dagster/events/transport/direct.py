"""The transport of a worker that shares the event log's database: straight into the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noetl_dagster.events.transport.intake import EventIntake
from noetl_dagster.events.types import Event


class DirectTransport:
    """Writes events itself; connection failures are retried by the event buffer before it."""

    transactional = True

    def __init__(self, intake: EventIntake) -> None:
        self._intake = intake

    async def publish(self, events: Sequence[Event]) -> None:
        await self._intake.handle_events(events)

    async def publish_on(self, events: Sequence[Event], connection: Any) -> set[int]:
        """As :meth:`publish`, within the transaction of a connection to the event log's database.

        Returns:
            The ids of the events that the log did not have.
        """
        return await self._intake.handle_events(events, connection=connection)

    async def close(self) -> None:
        """The pool belongs to the process."""
