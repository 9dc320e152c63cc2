"""``/compare``: two executions beside each other."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from noetl_dagster.engine.executions.comparing import compare
from noetl_dagster.service.pages.access import TheViewer
from noetl_dagster.service.pages.rendering import page
from noetl_dagster.service.pages.routing import page_router
from noetl_dagster.service.plane import ThePlane

router = page_router()

SIDES = ("left", "right")


@router.get("/compare")
async def comparison(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows what differs between the executions ``left`` and ``right``; without them, a form that asks for them."""
    given = {side: request.query_params.get(side, "").strip()[:100] for side in SIDES}
    wrong = [
        text for text in given.values() if text and not (text.isascii() and text.isdecimal() and int(text) < 2**63)
    ]
    found = None
    if all(given.values()) and not wrong:
        found = await compare(plane.engine.runtime.pool, int(given["left"]), int(given["right"]))
    return page(
        request,
        "compare.html",
        viewer,
        status=422 if wrong else 200,
        given=given,
        problem=f"{wrong[0]!r} is no execution id; ids are numbers" if wrong else "",
        found=found,
    )


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < 2**63
