"""``kind: http``: one request and its response, with errors that name the request."""

from __future__ import annotations

import datetime as dt
import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from noetl_dagster.errors import ErrorKind, ToolError, kind_of_status
from noetl_dagster.tools.access.web import HttpRequest, WebError, answered
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult, seconds_of
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.http.body import HttpResponse, ResponseBody, format_of_body, read_response, take_rows
from noetl_dagster.tools.http.request import (
    absolute_url,
    build_request,
    fields_of,
    find_credential,
    http_error,
    method_of,
    place_of,
    request_for_rest,
)
from noetl_dagster.tools.rows.cutters import CUT_FORMATS
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.rows.jsonable import NotJsonableError

DEFAULT_SECONDS = 30.0
RETRYABLE_STATUSES = frozenset({408, 425, 429})


class HttpTool(Tool):
    """Sends one request.

    Input: ``url`` (relative to the credential's ``url`` where that has one), ``method`` (GET), ``params``,
    ``headers``, ``json`` (mapping or list -> JSON, text -> raw) or ``form``, ``timeout`` seconds (30),
    ``verify_ssl`` (true), ``follow_redirects`` (true), ``auth``.

    Output: ``{status_code, headers, url, elapsed, data}``: ``elapsed`` in seconds, ``data`` the parsed JSON,
    else the text; other bodies are base64 text, with ``encoding: base64`` next to ``data``. A body of more
    than ``NOETL_HTTP_BODY_BYTES`` goes to the result store as it arrives: ``data`` is then its reference, which
    other tools accept as an input, with ``encoding: reference`` next to it.

    With ``format`` (jsonl, csv, json) ``data`` is the list of the body's rows, cut into chunks as the body arrives.
    The same holds for a body of such a content type if a step consumes the chunks, and for every JSON array of more
    than a chunk. After a restart, if a ``format`` or a step requested rows, the tool requests only the rest of the
    body, provided that the server supports ranges and reports the body's version. Otherwise it reads the body again,
    which must have the same rows.

    Raises ``ToolError`` for a status from 400 on and for connections that fail. Retryable
    are 408, 425, 429, 5xx, connection errors and time-outs; ``retry_after`` is the delay that the server requests.
    """

    kind = "http"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        """Sends the request and returns its response."""
        config = call.config
        access = fields_of(await find_credential(call, box))
        url = absolute_url(config.get("url"), access, call)
        started = time.perf_counter()
        try:
            format = _format(call)
            request = build_request(url, access, config, box)
            seconds = (seconds_of(call) if config.get("timeout") else None) or DEFAULT_SECONDS
        except (NotJsonableError, ValueError) as error:
            where = f"{method_of(config)} {box.credentials.redact(url)}"
            raise http_error(f"{where} cannot be sent: {box.credentials.redact(str(error))}") from None
        chunks = ChunkedResult(call, box)
        may_be_rows = format is not None or (chunks.wanted and call.task.kind == self.kind)
        if may_be_rows and not await chunks.seek():
            return await chunks.result({})
        if chunks.position is not None:
            request = request_for_rest(request, chunks.position)
        session = box.clients.http(verify_ssl=_truth(config.get("verify_ssl", True)))
        follow = _truth(config.get("follow_redirects", True))
        try:
            async with answered(session, request, seconds=seconds, follow=follow) as response:
                body = ResponseBody(response)
                rows = None
                if response.status < 400 and call.task.kind == self.kind:
                    rows = format or await format_of_body(body, chunks, box)
                if rows is not None:
                    await take_rows(body, rows, chunks, place_of(request, box))
                answer = await read_response(body, call, box)
        except WebError as error:
            raise _no_response(request, error, box) from None
        except ValueError as error:
            where = place_of(request, box)
            raise http_error(f"{where} cannot be sent: {box.credentials.redact(str(error))}") from None
        elapsed = time.perf_counter() - started
        details = {"http": {"status": answer.status, "headers": answer.headers}}
        if answer.status >= 400:
            raise _refused(place_of(request, box), answer, details, box)
        data: dict[str, Any] = {
            "status_code": answer.status,
            "headers": answer.headers,
            "url": answer.url,
            "elapsed": round(elapsed, 6),
            "data": answer.data,
        }
        if rows is not None:
            del data["data"]
            if chunks.position is not None:  # the rest of a body, which the playbook did not request
                details["http"]["status"] = data["status_code"] = HTTPStatus.OK.value
            return await chunks.result(data, details)
        if answer.encoding:
            data["encoding"] = answer.encoding
        return ToolResult(data=data, details=details)


def _format(call: ToolCall) -> RowFormat | None:
    """Returns the row format that the call specifies, if any."""
    given = call.config.get("format")
    if given is None or call.task.kind != HttpTool.kind:
        return None
    format = row_format(str(given), "")
    if format not in CUT_FORMATS:
        raise http_error(f"http in step {call.step}: format {format} is none of rows; write one of "
                      f"{', '.join(sorted(CUT_FORMATS))}, or leave it out for the body as one value")  # fmt: skip
    return format


def _refused(where: str, answer: HttpResponse, details: dict[str, Any], box: Toolbox) -> ToolError:
    status, excerpt = answer.status, answer.text
    if excerpt:
        details["http"]["body"] = excerpt
    return ToolError(
        f"{where} answered {status} {answer.reason}{': ' if excerpt else ''}{excerpt}",
        kind=kind_of_status(status),
        retryable=status in RETRYABLE_STATUSES or status >= 500,
        status=status,
        code=str(status),
        details=details,
        retry_after=retry_after_seconds(answer.headers.get("retry-after")),
    )


def _no_response(request: HttpRequest, error: WebError, box: Toolbox) -> ToolError:
    outcome = f"timed out ({error})" if error.late else f"failed: {error}"
    kind: ErrorKind = "timeout" if error.late else "connection" if error.retryable else "client_error"
    text = box.credentials.redact(f"{place_of(request, box)} {outcome}")
    return http_error(text, kind, retryable=error.retryable)


def retry_after_seconds(value: str | None) -> float | None:
    """Returns the seconds of a ``Retry-After`` header: a number, or a date (RFC 9110, 10.2.3)."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return max(0.0, (moment - dt.datetime.now(dt.UTC)).total_seconds())


def _truth(value: Any) -> bool:
    return value.strip().lower() not in ("false", "0", "no", "") if isinstance(value, str) else bool(value)
