"""``kind: http``: one request and its response, with errors that name the request."""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import orjson
from yarl import URL

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError, kind_of_status
from noetl_dagster.process import tracing
from noetl_dagster.process.spans import TRACEPARENT
from noetl_dagster.tools.access.credential_types import HTTP_TYPES, Credential, CredentialType
from noetl_dagster.tools.access.grants import API_KEY, BEARER, CredentialFields
from noetl_dagster.tools.access.web import (
    HttpRequest,
    WebError,
    address,
    answered,
    form_encoded,
    header_texts,
    public,
    same_origin,
)
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, seconds_of
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.http.body import TEXT, HttpResponse, ResponseBody, format_of_body, read_response, take_rows
from noetl_dagster.tools.rows.cutters import CUT_FORMATS
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.values import RefusedValueError, admit

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

    def __init__(self) -> None:
        self._latest = _CredentialFields()  # most calls use the credential of the call before

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Sends the request and returns its response. A token that the server does not accept is renewed once."""
        access = await self._credential_fields(call, context)
        try:
            return await self._respond(call, context, access)
        except ToolError as error:
            if error.status != HTTPStatus.UNAUTHORIZED or access.credential is None:
                raise
            if not context.credentials.reject(access.credential):
                raise
        return await self._respond(call, context, await self._credential_fields(call, context))

    async def _credential_fields(self, call: ToolCall, context: ToolContext) -> _CredentialFields:
        """Returns the headers and parameters for the credential that the task names; none without one."""
        try:
            credential = await context.credentials.resolve(call.auth, *HTTP_TYPES)
            latest = self._latest
            if latest.credential is not credential:
                latest = self._latest = _CredentialFields() if credential is None else _added(credential)
            return latest
        except CredentialError as error:
            raise call.error(str(error), error.kind, retryable=error.retryable) from None

    async def _respond(self, call: ToolCall, context: ToolContext, access: _CredentialFields) -> ToolResult:
        config = call.config
        url = _absolute_url(config.get("url"), access, call)
        takes_rows = call.task.kind == "http"  # a transfer reads rows in its own way
        started = time.perf_counter()
        try:
            format = _row_format(call) if takes_rows else None
            request = _build_request(url, access, config)
            seconds = _time_limit(call)
        except (RefusedValueError, ValueError) as error:
            raise _http_error(f"{_method(config)} {url} cannot be sent: {error}") from None
        chunks = ChunkedResult(call, context)
        if takes_rows and (format is not None or chunks.wanted) and not await chunks.seek():
            return await chunks.result({})
        if (position := chunks.position) is not None:  # the rest of the body, or all of it if it has changed
            rest = {"Range": f"bytes={position['offset']}-", "If-Range": str(position["version"])}
            request = request._replace(headers={**request.headers, **rest})
        web = context.clients.http(verify_ssl=_truth(config.get("verify_ssl", True)))
        follow = _truth(config.get("follow_redirects", True))
        try:
            async with answered(web, request, seconds=seconds, follow=follow) as response:
                body = ResponseBody(response)
                rows = None
                if response.status < 400 and takes_rows:
                    rows = format or await format_of_body(body, chunks, call, context)
                if rows is not None:
                    await take_rows(body, rows, chunks, call, _place(request))
                answer = await read_response(body, call, context)
        except WebError as error:
            outcome = f"timed out ({error})" if error.late else f"failed: {error}"
            kind: ErrorKind = "timeout" if error.late else "connection" if error.retryable else "client_error"
            raise _http_error(f"{_place(request)} {outcome}", kind, retryable=error.retryable) from None
        except ValueError as error:
            raise _http_error(f"{_place(request)} cannot be sent: {error}") from None
        elapsed = time.perf_counter() - started
        details: dict[str, Any] = {"http": {"status": answer.status, "headers": answer.headers}}
        if answer.links:
            details["http"]["links"] = answer.links
        if answer.status >= 400:
            raise _refused(_place(request), answer, details)
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


@dataclass(slots=True)
class _CredentialFields:
    """The headers and parameters that a credential adds to a request.

    Attributes:
        base_url: the only origin that may receive them; None: the first one that is asked.
    """

    credential: Credential | None = None
    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    base_url: str | None = None


def _added(credential: Credential) -> _CredentialFields:
    """Returns what a credential adds to a request. Raises ``CredentialError`` if a field is unknown or missing."""
    what = f"credential {credential.name!r} of type {credential.type}"
    base_url = credential.get("base_url", "url")
    access = _CredentialFields(credential, base_url=str(base_url) if base_url else None)
    headers = credential.get("headers")
    if isinstance(headers, Mapping):
        access.headers.update({str(name): str(value) for name, value in headers.items()})
    if credential.type is CredentialType.HEADER:
        fields = CredentialFields(what, credential.data, API_KEY)
        _add_key(what, fields, access)
        return access
    token = credential.get("token", "access_token", "bearer_token")
    user = credential.get("username", "user")
    if credential.type is CredentialType.BEARER:
        (token,) = CredentialFields(what, credential.data, BEARER).need("token")
    if token is not None and credential.type is not CredentialType.BASIC:
        access.headers["Authorization"] = f"Bearer {token}"
    elif user is not None:
        pair = f"{user}:{credential.get('password', default='')}"
        access.headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return access


def _add_key(what: str, fields: CredentialFields, access: _CredentialFields) -> None:
    """Adds an API key to the headers or the query."""
    (value,) = fields.need("value")
    place = str(fields.get("in", "query" if fields.get("param") else "header")).lower()
    if place == "header":
        access.headers[str(fields.get("header", "X-API-Key"))] = value
    elif place == "query":
        name = fields.get("param", fields.get("header"))
        access.params[str(name) if name is not None else fields.need("param")[0]] = value
    else:
        raise CredentialError(f"{what}: in is header or query, not {place!r}")


def _absolute_url(url: Any, access: _CredentialFields, call: ToolCall) -> str:
    """Returns the full address. A credential with its own address is sent nowhere else."""
    if not isinstance(url, str) or not (url or access.base_url):
        raise _http_error(f"http in step {call.step} has no 'url'")
    if "://" not in url:
        if access.base_url is None:
            raise _http_error(
                f"http in step {call.step}: url {url!r} is relative and no credential gives it a base; "
                "write http:// or https://, or name a credential with a url"
            )
        return f"{access.base_url.rstrip('/')}/{url.lstrip('/')}" if url else access.base_url
    is_secret = access.headers or access.params
    if is_secret and access.base_url and not same_origin(URL(url), URL(access.base_url)):
        raise _http_error(
            f"http in step {call.step}: the credential is for {public(URL(access.base_url))}, "
            f"not for {public(URL(url))}; use another credential for that address"
        )
    return url


def _build_request(url: str, access: _CredentialFields, config: Mapping[str, Any]) -> HttpRequest:
    """Returns the request of the task's fields. Raises ``RefusedValueError``, ``ValueError`` if one cannot be sent."""
    headers = header_texts(config.get("headers") or {})
    headers.update(access.headers)
    content, form = config.get("json"), config.get("form")
    body, kind = None, None
    if form is not None:
        body, kind = form_encoded(form), "application/x-www-form-urlencoded"
    elif isinstance(content, str | bytes):
        body = content.encode() if isinstance(content, str) else content
    elif content is not None:
        body, kind = orjson.dumps(admit(content, "json")), "application/json"
    if not any(name.lower() == TRACEPARENT for name in headers):
        headers.update(tracing.headers())
    if kind is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = kind
    params = config.get("params") or {}
    target = address(url, {**params, **access.params} if access.params else params)
    if target.raw_user and any(name.lower() == "authorization" for name in headers):
        target = target.with_user(None)  # the credential takes precedence over the address
    return HttpRequest(_method(config), target, headers, body, frozenset(map(str.lower, access.headers)))


def _time_limit(call: ToolCall) -> float | None:
    """Returns the seconds to connect, and for each part of the response; None: the task's own limit comes before."""
    seconds = (seconds_of(call) if call.config.get("timeout") else None) or DEFAULT_SECONDS
    most = None if call.limit is None else call.task.spec.timeout
    return None if most is not None and most <= seconds else seconds


def _place(request: HttpRequest) -> str:
    return f"{request.method} {public(request.url)}"


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("method") or "GET").upper()


def _http_error(message: str, kind: ErrorKind = "schema", *, retryable: bool = False) -> ToolError:
    """Returns the error of a request without a response."""
    return ToolError(message, kind=kind, retryable=retryable, details={"http": {"status": None}})


def _row_format(call: ToolCall) -> RowFormat | None:
    """Returns the row format that the call specifies, if any."""
    word = call.config.get("format")
    if word in (None, TEXT):
        return None
    format = row_format(str(word), "")
    if format not in CUT_FORMATS:
        raise _http_error(
            f"http in step {call.step}: format {format} is none of rows; write one of "
            f"{', '.join(sorted(CUT_FORMATS))}, or leave it out for the body as one value"
        )
    return format


def _refused(where: str, answer: HttpResponse, details: dict[str, Any]) -> ToolError:
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
