"""``/executions/<id>/result``: the content of a stored result, as much of it as a person can read."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.service.pages.access import TheViewer, secure_headers
from noetl_dagster.service.pages.execution import ExecutionId
from noetl_dagster.service.pages.rendering import MOST_ROWS, fragment, page_router, size
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import ApiProblem
from noetl_dagster.storage import codec
from noetl_dagster.values import is_table, legible

router = page_router()

MOST_DECODED = 8 * 1024**2
"""Bytes of a result that is decoded to be shown; of larger text the beginning is shown."""

MOST_TEXT = 64 * 1024
"""Bytes of text that are shown of a larger result."""


@router.get("/executions/{execution_id}/result")
async def result(
    execution_id: ExecutionId,
    plane: ThePlane,
    viewer: TheViewer,
    ref: Annotated[str, Query(max_length=2_000)],
) -> Response:
    """Returns the content of a result of an execution, as a part of its page."""
    if not re.match(rf"noetl://execution/{execution_id}/", ref):
        raise ApiProblem(404, f"{ref[:200]} is no result of execution {execution_id}")
    reference = await plane.engine.runtime.results.find(ref)
    html = await _shown(plane, reference)
    return HTMLResponse(html, headers=secure_headers())


async def _shown(plane: Plane, ref: ResultRef) -> str:
    """Renders a result: rows as a table, other values as JSON or text, and why if there is too much of it."""
    if ref.kind is not RefKind.OBJECT:
        return await _first_rows(plane, ref)
    data, whole = bytearray(), True
    async for chunk in plane.engine.runtime.results.stream(ref):
        data += chunk
        if len(data) > MOST_DECODED:
            whole = False
            break
    if whole:
        value = await run_in_threadpool(codec.decode, bytes(data), ref.content_type)
        if is_table(value):
            value = legible(value.slice(0, MOST_ROWS).to_pylist())
        if not isinstance(value, bytes):
            return fragment("content.html", value=value, text=None, note="")
    elif codec.is_readable(ref.content_type):
        text = bytes(data[:MOST_TEXT]).decode("utf-8", "replace")
        return fragment("content.html", value=None, text=text, note=f"the first {size(MOST_TEXT)}")
    note = f"{ref.content_type} of {size(ref.bytes_size)}, which a page does not show: GET /api/results/content"
    return fragment("content.html", value=None, text=None, note=note)


async def _first_rows(plane: Plane, ref: ResultRef) -> str:
    """Renders the first rows of a result of several objects or files."""
    rows: list[Any] = []
    async for batch in plane.engine.runtime.results.batches(ref):
        rows += batch[:MOST_ROWS] if isinstance(batch, list) else legible(batch.slice(0, MOST_ROWS).to_pylist())
        if len(rows) >= MOST_ROWS:
            break
    return fragment("content.html", value=rows[:MOST_ROWS], text=None, note=f"the first {MOST_ROWS} rows")
