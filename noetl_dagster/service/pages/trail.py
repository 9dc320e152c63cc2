"""``/executions/<id>/events``: the filtered trail of events, live or as JSON Lines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from fastapi import Query, Request
from starlette.responses import Response, StreamingResponse

from noetl_dagster.engine.executions.trail import EventFilter, all_filtered_events, filtered_events
from noetl_dagster.events.commit_order import START, Position, events_in_commit_order, has_ended, horizon
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.service.pages.access import TheViewer, secure_headers
from noetl_dagster.service.pages.execution import ExecutionId
from noetl_dagster.service.pages.live import answer, response
from noetl_dagster.service.pages.rendering import fragment, page, page_router
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import ApiProblem

router = page_router()

SHOWN = 200
MOST_READ = 10
"""Pages of the log that are read for one answer; a live page asks again for the rest."""

DOWNLOADED = 1_000
"""Events that a download reads from the log at a time."""

FIELDS = ("type", "step", "index", "error", "after", "from")

TYPES = ("playbook.*", "step.*", "loop.*", "command.*", "command.failed", "check.evaluated", "warning")
"""Types that the page suggests, beside those of :class:`EventType`."""


@router.get("/executions/{execution_id}/events")
async def events(execution_id: ExecutionId, request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows a page of the events that the filters choose."""
    fields = _given(request)
    wanted = _filter(fields)
    pool = plane.engine.runtime.pool
    position = await horizon(pool)  # first: an older transaction may commit after the events are read
    rows = await filtered_events(pool, execution_id, wanted, SHOWN + 1)
    if not rows:
        await _must_exist(plane, execution_id)
    shown = rows[:SHOWN]
    following = _query({**fields, "from": "", "after": str(shown[-1].event_id)}) if len(rows) > SHOWN else ""
    is_live = not following and not await has_ended(pool, execution_id, position)
    return page(
        request,
        "events.html",
        viewer,
        id=execution_id,
        fields=fields,
        query=_query(fields),
        rows=fragment("parts/trail_rows.html", id=execution_id, events=shown),
        number=len(shown),
        following=following,
        position=position if is_live else None,
        types=(*TYPES, *EventType),
    )


@router.get("/executions/{execution_id}/events/live")
async def live(
    execution_id: ExecutionId,
    request: Request,
    plane: ThePlane,
    viewer: TheViewer,
    position: Annotated[str, Query(max_length=50)] = str(START),
) -> Response:
    """Returns the events after a position that the filters choose, in the order of commits."""
    wanted, pool = _filter(_given(request)), plane.engine.runtime.pool
    try:
        after = Position.parse(position)
    except ValueError:
        raise ApiProblem(422, f"{position[:50]!r} is no position of the log") from None
    events: list[Event] = []
    is_last = False
    for _ in range(MOST_READ):
        committed = await events_in_commit_order(pool, execution_id, after)
        events += [one.event for one in committed.events if one.position > after and wanted.matches(one.event)]
        after, is_last = max(after, committed.position), committed.is_last
        if is_last:
            break
    ended = is_last and await has_ended(pool, execution_id, after)
    if not events and not ended:
        await _must_exist(plane, execution_id)
    rows = fragment("parts/trail_rows.html", id=execution_id, events=events)
    return response(answer(str(after), {}, rows, ended=ended))


@router.get("/executions/{execution_id}/events.jsonl")
async def download(execution_id: ExecutionId, request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Streams the events that the filters choose as JSON Lines, in the order of their ids."""
    wanted, pool = _filter(_given(request)), plane.engine.runtime.pool
    first = await filtered_events(pool, execution_id, wanted, DOWNLOADED)  # its errors are answered as such
    if not first:
        await _must_exist(plane, execution_id)

    async def lines() -> AsyncIterator[bytes]:
        yield _json_lines(first)
        if len(first) == DOWNLOADED:
            following = replace(wanted, after=first[-1].event_id)
            async for chosen in all_filtered_events(pool, execution_id, following, page=DOWNLOADED):
                yield _json_lines(chosen)

    headers = {**secure_headers(), "content-disposition": f'attachment; filename="events-{execution_id}.jsonl"'}
    return StreamingResponse(lines(), media_type="application/jsonl", headers=headers)


def _json_lines(events: Sequence[Event]) -> bytes:
    return b"".join(orjson.dumps(message_of(event), default=str) + b"\n" for event in events)


async def _must_exist(plane: Plane, execution_id: int) -> None:
    """Raises ``ApiProblem`` 404 for an execution that the log does not have."""
    if await plane.handler.unknown_executions([execution_id]):
        raise ApiProblem(404, f"no execution {execution_id} in the event log")


def _given(request: Request) -> dict[str, str]:
    return {name: request.query_params.get(name, "").strip()[:500] for name in FIELDS}


def _filter(fields: Mapping[str, str]) -> EventFilter:
    """Returns the filter of the fields of an address.

    Raises:
        ApiProblem: 422, a field is no number.
    """
    numbers: dict[str, Any] = {}
    for name, most in (("index", 2**31), ("after", 2**63), ("from", 2**63)):
        text = fields[name]
        if text and not (text.isdecimal() and int(text) < most):
            raise ApiProblem(422, f"{name}: {text!r} is no number from 0 to {most - 1}")
        numbers[name] = int(text) if text else None
    after = numbers["after"] or 0
    if numbers["from"]:
        after = numbers["from"] - 1
    return EventFilter(
        type=fields["type"] or None,
        step=fields["step"] or None,
        index=numbers["index"],
        error=fields["error"] or None,
        after=after,
    )


def _query(fields: Mapping[str, str]) -> str:
    return urlencode({name: text for name, text in fields.items() if text})
