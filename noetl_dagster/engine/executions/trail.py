"""The events of an execution, filtered, in the order of their ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import asyncpg

from noetl_dagster.engine.executions.listing import QUERY_SECONDS
from noetl_dagster.events.log import as_event
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.types import Event

_LIST = ", ".join(COLUMNS)

FILTERED = f"""
SELECT {_LIST} FROM noetl.event
WHERE execution_id = $1 AND event_id > $2
  AND ($3::text IS NULL OR event_type LIKE $3) AND ($4::text IS NULL OR node_name = $4)
  AND ($5::int IS NULL OR current_index = $5)
  AND ($6::text IS NULL OR position(lower($6) IN lower(error)) > 0)
ORDER BY event_id LIMIT $7
"""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; None: any.

    Attributes:
        type: the type of events, or its beginning with a star, as ``loop.*``.
        step: the step, or the playbook.
        index: the iteration.
        error: a text that the error contains, in any case.
        after: those with a larger id.
    """

    type: str | None = None
    step: str | None = None
    index: int | None = None
    error: str | None = None
    after: int = 0

    def matches(self, event: Event) -> bool:
        """Reports whether an event is wanted, whatever its id."""
        if self.type is not None:
            beginning, star, _ = self.type.partition("*")
            if not (event.event_type.startswith(beginning) if star else event.event_type == beginning):
                return False
        return (
            self.step in (None, event.node_name)
            and self.index in (None, event.current_index)
            and (self.error is None or self.error.lower() in (event.error or "").lower())
        )


async def filtered_events(pool: asyncpg.Pool, execution_id: int, wanted: EventFilter, limit: int) -> list[Event]:
    """Returns events in the order of their ids.

    Raises:
        TimeoutError: the filter matches too little of a long log.
    """
    pattern = None
    if wanted.type is not None:
        beginning, star, _ = wanted.type.partition("*")
        pattern = beginning.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + ("%" if star else "")
    values = (execution_id, wanted.after, pattern, wanted.step, wanted.index, wanted.error, limit)
    return [as_event(row) for row in await pool.fetch(FILTERED, *values, timeout=QUERY_SECONDS)]


async def all_filtered_events(
    pool: asyncpg.Pool, execution_id: int, wanted: EventFilter, *, page: int = 1_000
) -> AsyncIterator[list[Event]]:
    """Yields all events that a filter chooses, in lists."""
    while events := await filtered_events(pool, execution_id, wanted, page):
        yield events
        wanted = replace(wanted, after=events[-1].event_id)
