"""The section of ``/workers`` about messages that could not be ingested, and the button that reprocesses one."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from noetl_dagster.events.transport.wire import Id
from noetl_dagster.service.pages.access import TheForm, Viewer
from noetl_dagster.service.pages.rendering import fragment
from noetl_dagster.service.pages.routing import page_router
from noetl_dagster.service.plane import Plane, ThePlane

router = page_router()

SHOWN = 20
BEFORE, REPROCESSED = "letters_before", "reprocessed"
"""Parameters of ``/workers``: only letters with a smaller id; the letter whose reprocessing has just ended."""


async def dead_letters_section(request: Request, plane: Plane, viewer: Viewer) -> Markup:
    """Returns the section for a viewer; it contains forms, so viewers cannot share it."""
    letters = plane.dead_letters
    before, reprocessed = _number(request, BEFORE), _number(request, REPROCESSED)
    newest = await letters.newest(SHOWN + 1, before=before)
    return fragment(
        "parts/dead_letters.html",
        viewer=viewer,
        letters=newest[:SHOWN],
        older=newest[SHOWN - 1].id if len(newest) > SHOWN else None,
        number=await letters.count(),
        reprocessed=reprocessed,
        remaining=None if reprocessed is None else await letters.find(reprocessed),
    )


@router.post("/dead-letters/{letter_id}/reprocess")
async def reprocess(letter_id: Annotated[Id, Path()], plane: ThePlane, form: TheForm) -> Response:
    """Reprocesses a dead letter, and shows the outcome in the section."""
    await plane.dead_letters.reprocess(letter_id)
    return RedirectResponse(f"/workers?{REPROCESSED}={letter_id}#dead-letters", 303)


def _number(request: Request, name: str) -> int | None:
    """Returns a parameter that is the id of a letter, else None."""
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
