"""``/executions``: the newest ones, filtered, and their number in each state; ``/compare``: two beside each other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import asyncpg
from fastapi import Request
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from noetl_dagster.engine.executions.comparing import compare
from noetl_dagster.engine.executions.listing import (
    MOST_COUNTED,
    ExecutionFilter,
    ListedExecution,
    count_executions,
    list_executions,
)
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.service.pages.access import TheViewer, secure_headers
from noetl_dagster.service.pages.rendering import fragment, page, page_router
from noetl_dagster.service.plane import Plane, ThePlane

router = page_router()

SHOWN = 50
FIELDS = ("playbook", "status", "since", "until", "workload", "parent", "before")

KEPT_SECONDS = 1.0
"""A listing is rendered at most once in this time, however many people look at it."""

MOST_KEPT = 100


@router.get("/executions")
async def executions(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows the executions that the filters of the address choose."""
    fields = _given(request.query_params)
    problem = _problem(fields)
    listing = Markup("") if problem else await _listing(plane, fields)
    return page(
        request,
        "executions.html",
        viewer,
        fields=fields,
        statuses=list(ExecutionStatus),
        is_filtered=any(fields.values()),
        problem=problem,
        query=_query(fields),
        listing=listing,
    )


@router.get("/executions/listing")
async def executions_listing(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Returns the list alone, which open pages fetch every two seconds."""
    fields = _given(request.query_params)
    if _problem(fields):
        return HTMLResponse("", 422, secure_headers())
    listings: dict[str, tuple[float, Markup]] = request.app.state.listings
    query, now = _query(fields), time.monotonic()
    if query not in listings or now - listings[query][0] > KEPT_SECONDS:
        if len(listings) >= MOST_KEPT:
            listings.clear()
        listings[query] = now, await _listing(plane, fields)
    return HTMLResponse(listings[query][1], headers=secure_headers())


async def _listing(plane: Plane, fields: Mapping[str, str]) -> Markup:
    pool, wanted = plane.engine.runtime.pool, _filter(fields)
    rows = await list_executions(pool, wanted, SHOWN + 1)
    counts = await count_executions(pool, replace(wanted, before=None))
    whole = sum(counts.values())
    tabs = [("all", "", whole), *((status.lower(), status, number) for status, number in counts.items())]
    older = _query({**fields, "before": str(rows[SHOWN - 1].execution_id)}) if len(rows) > SHOWN else ""
    return fragment(
        "listing.html",
        rows=[_row(one) for one in rows[:SHOWN]],
        older=older,
        counts=[
            {
                "name": name,
                "number": number,
                "capped": whole >= MOST_COUNTED,
                "query": _query({**fields, "status": status, "before": ""}),
                "chosen": fields["status"] == status,
            }
            for name, status, number in tabs
        ],
    )


def _row(one: ListedExecution) -> dict[str, Any]:
    ended = one.ended_at or datetime.now(UTC)
    names = ("execution_id", "playbook", "path", "partition", "parent", "status", "started_at", "error")
    return {name: getattr(one, name) for name in names} | {"seconds": (ended - one.started_at).total_seconds()}


def _given(query: Mapping[str, str]) -> dict[str, str]:
    return {name: query.get(name, "").strip()[:500] for name in FIELDS}


def _problem(fields: Mapping[str, str]) -> str:
    """Returns what is wrong with filters, or an empty text."""
    for name in ("since", "until"):
        if fields[name] and _time(fields[name]) is None:
            return f"{name}: {fields[name]!r} is no time; write it as 2026-01-31T12:00 (UTC)"
    for name in ("parent", "before"):
        if fields[name] and not (fields[name].isdecimal() and int(fields[name]) < 2**63):
            return f"{name}: {fields[name]!r} is no execution id; ids are numbers"
    if fields["status"] and fields["status"] not in list(ExecutionStatus):
        return f"state: {fields['status']!r} is none of {', '.join(ExecutionStatus)}"
    return ""


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _filter(fields: Mapping[str, str]) -> ExecutionFilter:
    return ExecutionFilter(
        playbook=fields["playbook"] or None,
        status=fields["status"] or None,
        since=_time(fields["since"]),
        until=_time(fields["until"]),
        workload=fields["workload"] or None,
        parent=int(fields["parent"]) if fields["parent"] else None,
        before=int(fields["before"]) if fields["before"] else None,
    )


def _query(fields: Mapping[str, str]) -> str:
    return urlencode({name: text for name, text in fields.items() if text})


SIDES = ("left", "right")

PLAYBOOK_OF = """
SELECT COALESCE(context ->> 'path', node_name) FROM noetl.event
WHERE execution_id = $1 AND event_type = 'playbook.initialized' LIMIT 1
"""


@router.get("/compare")
async def comparison(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows what differs between the executions ``left`` and ``right``; without them, a form that asks for them.

    An execution that is given alone, as ``right``, is compared with the one of the same playbook before it.
    """
    ids = {side: request.query_params.get(side, "").strip()[:100] for side in SIDES}
    wrong = [text for text in ids.values() if text and not _is_id(text)]
    compared, runtime = None, plane.engine.runtime
    if ids["right"] and not ids["left"] and not wrong:
        ids["left"] = await _one_before(runtime.pool, int(ids["right"]))
    if all(ids.values()) and not wrong:
        compared = await compare(runtime, int(ids["left"]), int(ids["right"]))
    return page(
        request,
        "compare.html",
        viewer,
        status=422 if wrong else 200,
        ids=ids,
        problem=f"{wrong[0]!r} is no execution id; ids are numbers" if wrong else "",
        compared=compared,
    )


async def _one_before(pool: asyncpg.Pool, execution_id: int) -> str:
    """Returns the id of the previous execution of the same playbook; an empty text if it is not found in time."""
    playbook = await pool.fetchval(PLAYBOOK_OF, execution_id)
    wanted = ExecutionFilter(playbook=playbook, before=execution_id)
    try:
        earlier = await list_executions(pool, wanted, 1) if playbook else []
    except TimeoutError:
        earlier = []
    return str(earlier[0].execution_id) if earlier else ""


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < 2**63
