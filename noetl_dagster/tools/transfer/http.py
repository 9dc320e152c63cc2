"""http as a source, one response or page by page, and as a target."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import next_url
from noetl_dagster.tools.base import ToolCall, ToolContext, as_result_ref
from noetl_dagster.tools.http.body import TEXT
from noetl_dagster.tools.http.tool import HttpTool
from noetl_dagster.tools.rows.arrow import Row, plain_rows
from noetl_dagster.tools.rows.batches import rows_of
from noetl_dagster.tools.rows.cutters import begins_array
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.transfer.chunks import (
    Transfer,
    TransferChunk,
    TransferOutcome,
    TransferSource,
    sliced,
)
from noetl_dagster.tools.transfer.files import text_chunks
from noetl_dagster.tools.transfer.options import Paging, TransferEnd
from noetl_dagster.tools.transfer.staging import digest_of

Page = dict[str, Any]
"""The address of a page: ``{"url": ...}`` or ``{"param": value}``; empty for the first one."""

IDEMPOTENCY = "idempotency-key"


class HttpSource(TransferSource):
    """The rows of a response. With ``paging``, each page is one or more chunks, and is requested when it is needed."""

    def __init__(self, end: TransferEnd, call: ToolCall, context: ToolContext, size: int) -> None:
        self._end, self._call, self._tool_context, self._size = end, call, context, size
        self.seeks = end.paging is not None

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows of the response, or of the pages from a position on."""
        paging = self._end.paging
        if paging is None:
            async for chunk in await self._of_body(await self._ask({})):
                yield chunk
            return
        first = {paging.param: paging.start} if paging.param and not paging.next else {}
        page: Page | None = first if after is None else after["page"]
        while page is not None:
            answer = await self._ask(page)
            rows = self._rows(answer)
            page = _next_page(paging, page, answer, rows)
            async for chunk in sliced(rows, self._size, {"page": page}):
                yield chunk

    async def _ask(self, page: Page) -> Any:
        """Sends a request; returns the result of the http tool."""
        request = dict(self._end.request)
        if self._end.format in (RowFormat.JSONL, "ndjson", RowFormat.CSV):  # whatever type the server names
            request["format"] = TEXT
        if "url" in page:
            request["url"] = page["url"]
            request.pop("params", None)
        elif page:
            request["params"] = {**(request.get("params") or {}), **page}
        call = replace(self._call, config=request, auth=self._end.auth)
        return (await HttpTool().run(call, self._tool_context)).data

    def _rows(self, answer: Any) -> list[Row]:
        body = answer["data"]
        if answer.get("encoding") == "reference":
            raise ToolError(
                f"transfer: the response is larger than NOETL_HTTP_BODY_BYTES "
                f"({self._tool_context.settings.http_body_bytes}); write 'paging' for smaller ones, or raise it",
                kind="schema",
            )
        for name in filter(None, self._end.rows.split(".")):
            if not isinstance(body, dict) or name not in body:
                shown = f"text: {body[:80]!r}" if isinstance(body, str) else "another value"
                raise ToolError(
                    f"transfer: {answer['url']} has no {self._end.rows!r}; "
                    f"where {name!r} should be is {'a mapping without it' if isinstance(body, dict) else shown}",
                    kind="schema",
                )
            body = body[name]
        return rows_of(body)

    async def _of_body(self, answer: Any) -> AsyncIterator[TransferChunk]:
        format, body, size = row_format(self._end.format or "jsonl", ""), answer["data"], self._size
        is_stored, numbers = answer.get("encoding") == "reference", self._end.numbers
        if not self._end.rows:
            is_text = isinstance(body, str) or (is_stored and self._end.format)
            if is_text and format in (RowFormat.JSONL, RowFormat.CSV):
                return text_chunks(self._blocks(body), format, size, answer["url"], numbers=numbers)
            if is_stored and await self._is_array(body):
                return text_chunks(self._blocks(body), RowFormat.JSON, size, answer["url"], numbers=numbers)
        return sliced(self._rows(answer), size)

    async def _is_array(self, body: Any) -> bool:
        async with aclosing(cast(Any, self._blocks(body))) as blocks:
            return begins_array(await anext(blocks, b""))

    async def _blocks(self, body: Any) -> AsyncIterator[bytes]:
        if isinstance(body, str):
            yield body.encode()
            return
        reference = as_result_ref(body)
        assert reference is not None  # the http tool has just stored it
        async for block in self._tool_context.results.stream(reference):
            yield bytes(block)


def _next_page(paging: Paging, page: Page, answer: Any, rows: list[Row]) -> Page | None:
    """Returns the page after a page; None after the last one.

    A page may not lead to another server, which must not get the credentials of this one.
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
        following = {"url": next_url(value, answer["url"])}
    if following == page:
        raise ToolError(f"transfer: the page behind {value!r} leads to itself", kind="schema")
    return following


async def write_http(transfer: Transfer) -> TransferOutcome:
    """Sends each chunk as a JSON list.

    A command that runs again sends all chunks again. Each has the same ``Idempotency-Key`` then, unless the playbook
    writes one, by which the receiver knows those that it has.
    """
    tool, target, call, count = HttpTool(), transfer.target, transfer.call, 0
    key = digest_of([call.execution_id, call.command_id, call.task.name, call.number])
    async for chunk in transfer.chunks():
        rows = plain_rows(chunk.data, count)
        config: dict[str, Any] = {"method": "POST", **target.request, "json": rows}
        headers = config.get("headers") or {}
        if isinstance(headers, Mapping) and not any(name.lower() == IDEMPOTENCY for name in headers):
            config["headers"] = {**headers, "Idempotency-Key": f"{key}-{transfer.chunk_count}"}
        await tool.run(replace(transfer.call, config=config, auth=target.auth), transfer.tool_context)
        count += len(rows)
    return TransferOutcome(count, count)
