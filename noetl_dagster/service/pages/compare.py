"""``/compare``: two executions beside each other."""

from __future__ import annotations

import asyncpg
from fastapi import Request
from starlette.responses import Response

from noetl_dagster.engine.executions.comparing import compare
from noetl_dagster.engine.executions.listing import ExecutionFilter, list_executions
from noetl_dagster.service.pages.access import TheViewer
from noetl_dagster.service.pages.rendering import page
from noetl_dagster.service.pages.routing import page_router
from noetl_dagster.service.plane import ThePlane

router = page_router()

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
    wrong = [text for text in ids.values() if text and not (text.isascii() and text.isdecimal() and int(text) < 2**63)]
    compared, pool = None, plane.engine.runtime.pool
    if ids["right"] and not ids["left"] and not wrong:
        ids["left"] = await _one_before(pool, int(ids["right"]))
    if all(ids.values()) and not wrong:
        compared = await compare(pool, int(ids["left"]), int(ids["right"]))
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
