"""``/api/dead-letters``: messages of workers that could not be ingested."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel

from noetl_dagster.events.transport.wire import Id
from noetl_dagster.service.access import FOR_OPERATORS, FOR_READERS
from noetl_dagster.service.plane import ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem

router = APIRouter(prefix="/api/dead-letters", tags=["dead letters"], responses=RESPONSES)


class DeadLetterView(BaseModel):
    """A message that could not be ingested. Times are UTC.

    Attributes:
        id: number of the dead letter.
        subject: NATS subject of the message, which names its sender.
        error: why the log did not take it the last time.
        deliveries: attempts to ingest it.
        created_at: time at which it was put aside.
        size: bytes of its content.
        preview: the beginning of its content as text, without secrets.
    """

    id: Id
    subject: str
    error: str
    deliveries: int
    created_at: datetime
    size: int
    preview: str


class DeadLetterListing(BaseModel):
    """Dead letters, the newest first, and how many there are. ``more``: ask for those ``before`` the last id."""

    dead_letters: list[DeadLetterView]
    count: int
    more: bool


class ReprocessedView(BaseModel):
    """The outcome of another attempt.

    Attributes:
        stored: the log has all events of the message, and the dead letter is deleted.
        new: number of events that were new to the log.
        known: number of events that the log had already.
        error: why the dead letter is kept.
    """

    stored: bool
    new: int
    known: int
    error: str | None


@router.get("", dependencies=[FOR_READERS])
async def list_dead_letters(
    plane: ThePlane,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    before: Annotated[Id | None, Query(description="only dead letters with a smaller id")] = None,
) -> DeadLetterListing:
    """Lists messages of workers that could not be ingested, the newest first."""
    found = await plane.dead_letters.newest(limit + 1, before=before)
    return DeadLetterListing(
        dead_letters=[DeadLetterView(**letter._asdict()) for letter in found[:limit]],
        count=await plane.dead_letters.count(),
        more=len(found) > limit,
    )


@router.post("/{letter_id}/reprocess", dependencies=[FOR_OPERATORS])
async def reprocess(
    letter_id: Annotated[Id, Path(description="id of the dead letter")], plane: ThePlane
) -> ReprocessedView:
    """Processes a dead letter again, as if its message had just arrived.

    All its events are stored and the dead letter is deleted in one transaction. Otherwise it is kept with the new
    reason. Repeating the request is safe.
    """
    done = await plane.dead_letters.reprocess(letter_id)
    if done is None:
        raise ApiProblem(404, f"no dead letter {letter_id}; it may have been reprocessed before")
    return ReprocessedView(stored=done.error is None, **done._asdict())
