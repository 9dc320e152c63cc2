"""http as a source: one response, or page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from yarl import URL

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.access.web import public, same_origin
from noetl_dagster.tools.base import Toolbox, ToolCall, as_result_ref
from noetl_dagster.tools.http.tool import HttpTool
from noetl_dagster.tools.rows.batches import rows_of
from noetl_dagster.tools.rows.cutters import begins_array
from noetl_dagster.tools.rows.files import Row
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.transfer.chunks import Chunk, sliced
from noetl_dagster.tools.transfer.files import text_chunks
from noetl_dagster.tools.transfer.options import Paging, Place

Page = dict[str, Any]
"""What leads to a page: ``{"url": ...}`` or ``{"param": value}``; empty for the first one as it is."""


_EXCERPT = 80


class HttpSource:
    """The rows of a response. With ``paging`` each page is a chunk or several, and is asked for when it is needed."""

    def __init__(self, place: Place, call: ToolCall, box: Toolbox, size: int) -> None:
        self._place, self._call, self._box, self._size = place, call, box, size
        self.seeks = place.paging is not None
        self.bytes = 0

    async def identity(self) -> str:
        return ""

    async def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        paging = self._place.paging
        if paging is None:
            answer = await self._ask({})
            async for chunk in self._of_body(answer):
                yield chunk
            return
        page: Page | None = after["page"] if after is not None else _first(paging)
        while page is not None:
            answer = await self._ask(page)
            rows = self._rows(answer)
            page = _following(paging, page, answer, rows)
            async for chunk in sliced(rows, self._size, {"page": page}):
                yield chunk

    async def _ask(self, page: Page) -> Any:
        """The answer to a request: what the http tool gives."""
        request = dict(self._place.request)
        if "url" in page:
            request["url"] = page["url"]
            request.pop("params", None)
        elif page:
            request["params"] = {**(request.get("params") or {}), **page}
        call = replace(self._call, config=request, auth=self._place.auth)
        return (await HttpTool().run(call, self._box)).data

    def _rows(self, answer: Any) -> list[Row]:
        body = answer["data"]
        if answer.get("encoding") == "reference":
            raise ToolError(
                f"transfer: the response is larger than NOETL_HTTP_BODY_BYTES "
                f"({self._box.settings.http_body_bytes}); write 'paging' for smaller ones, or raise it",
                kind="schema",
            )
        for name in filter(None, self._place.rows.split(".")):
            if not isinstance(body, dict) or name not in body:
                found = f"text: {body[:_EXCERPT]!r}" if isinstance(body, str) else "another value"
                raise ToolError(
                    f"transfer: {answer['url']} has no {self._place.rows!r}; "
                    f"where {name!r} should be is {'a mapping without it' if isinstance(body, dict) else found}",
                    kind="schema",
                )
            body = body[name]
        return rows_of(body)

    async def _of_body(self, answer: Any) -> AsyncIterator[Chunk]:
        format = row_format(self._place.format or "jsonl", "")
        stored = answer.get("encoding") == "reference"
        streamed = format in (RowFormat.JSONL, RowFormat.CSV) and not self._place.rows
        if streamed and (isinstance(answer["data"], str) or (stored and self._place.format)):
            chunks = text_chunks(self._blocks(answer["data"]), format, self._size, answer["url"])
        elif stored and not self._place.rows and await self._is_array(answer["data"]):
            chunks = text_chunks(self._blocks(answer["data"]), RowFormat.JSON, self._size, answer["url"])
        else:
            chunks = sliced(self._rows(answer), self._size)
        async for chunk in chunks:
            yield chunk

    async def _is_array(self, body: Any) -> bool:
        async with aclosing(cast(Any, self._blocks(body))) as blocks:
            return begins_array(await anext(blocks, b""))

    async def _blocks(self, body: Any) -> AsyncIterator[bytes]:
        if isinstance(body, str):
            yield body.encode()
            return
        reference = as_result_ref(body)
        assert reference is not None  # the http tool has just stored it
        async for block in self._box.results.stream(reference):
            yield bytes(block)


def _first(paging: Paging) -> Page:
    return {paging.param: paging.start} if paging.param and not paging.next else {}


def _following(paging: Paging, page: Page, answer: Any, rows: list[Row]) -> Page | None:
    """What leads on from a page; None behind the last one.

    Raises:
        ToolError: a page leads to itself, or to another server, which must not see what this one may.
    """
    if not paging.next:
        step = len(rows) if paging.step == "rows" else int(paging.step)
        return {paging.param: page[paging.param] + step} if rows else None
    value = answer["data"]
    for name in paging.next.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None or value == "" or value is False:
        return None
    if paging.param:
        following: Page = {paging.param: value}
    else:
        here = URL(answer["url"])
        there = here.join(URL(str(value)))
        if not same_origin(here, there):
            raise ToolError(
                f"transfer: a page of {public(here)} leads to {public(there)}, another server", kind="schema"
            )
        following = {"url": str(there)}
    if following == page:
        raise ToolError(f"transfer: the page behind {value!r} leads to itself", kind="schema")
    return following
