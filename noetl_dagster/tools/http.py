"""``kind: http``: one request, with authentication by credential and an honest error envelope."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from yarl import URL

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError, kind_of_status
from noetl_dagster.process.tracing import trace
from noetl_dagster.process.tracing.spans import TRACEPARENT
from noetl_dagster.settings import StoreTier
from noetl_dagster.tools.access.credentials import HTTP_TYPES, Credential, CredentialType
from noetl_dagster.tools.access.web import (
    Request,
    WebError,
    address,
    answered,
    form_encoded,
    public,
    same_origin,
)
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult, seconds_of
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.rows.cutters import CUT_FORMATS, Piece, begins_array, cutter_for, ends_value
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable

if TYPE_CHECKING:
    from aiohttp import ClientResponse

DEFAULT_SECONDS = 30.0
EXCERPT = 300
_LOOK = 1024  # bytes of a body that show what it is
RETRYABLE_STATUSES = frozenset({408, 425, 429})
_NOT_STREAMED = (StoreTier.EVENTLOG, StoreTier.MEMORY)
_ROW_TYPES = {
    "application/x-ndjson": RowFormat.JSONL,
    "application/ndjson": RowFormat.JSONL,
    "application/jsonl": RowFormat.JSONL,
    "application/x-jsonlines": RowFormat.JSONL,
    "text/csv": RowFormat.CSV,
}
_TEXT_TYPES = ("text/", "json", "xml", "javascript", "x-www-form-urlencoded", "yaml", "graphql")


@dataclass(slots=True)
class _Access:
    """What a credential adds to a request, and the origin that may see it (None: the first one asked)."""

    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    base_url: str | None = None

    @property
    def secret(self) -> bool:
        return bool(self.headers or self.params)


class HttpTool(Tool):
    """Sends one request.

    Input: ``url`` (relative to the credential's ``url`` where that has one), ``method`` (GET), ``params``,
    ``headers``, ``json`` (mapping or list -> JSON, text -> raw) or ``form``, ``timeout`` seconds (30),
    ``verify_ssl`` (true), ``follow_redirects`` (true), ``auth``.

    Output: ``{status_code, headers, url, elapsed, data}``: ``elapsed`` in seconds, ``data`` the parsed JSON,
    else the text; other bodies are base64 text and ``encoding: base64`` stands beside ``data``. A body of more
    than ``NOETL_HTTP_BODY_BYTES`` goes to the result store as it comes: ``data`` is its reference then, which
    other tools take as an input, and ``encoding: reference`` stands beside it.

    With ``format`` (jsonl, csv, json) ``data`` is the list of the body's rows, cut into chunks as it comes. So it is
    too of a body whose content type says so where a step takes the chunks, and always of a JSON array of more than a
    chunk. After a restart the server is asked for the rest where a ``format`` or a step has asked for rows, if it takes
    ranges and says what version a body is of; else the body is read again and must have the same rows.

    Raises ``ToolError`` for a status from 400 on and for connections that fail. Retryable
    are 408, 425, 429, 5xx, connection errors and time-outs; ``retry_after`` carries the server's wish.
    """

    kind = "http"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        config = call.config
        access = _access(await _credential(call, box))
        url = _absolute(config.get("url"), access, call)
        started = time.perf_counter()
        try:
            format = _format(call)
            request = _request(url, access, config, box)
            seconds = (seconds_of(call) if config.get("timeout") else None) or DEFAULT_SECONDS
        except (NotJsonableError, ValueError) as error:
            where = f"{_method(config)} {box.credentials.redact(url)}"
            raise _failed(f"{where} cannot be sent: {box.credentials.redact(str(error))}") from None
        chunks = ChunkedResult(call, box)
        may_be_rows = format is not None or (chunks.wanted and call.task.kind == self.kind)
        if may_be_rows and not await chunks.seek():
            return await chunks.result({})
        if chunks.position is not None:
            request = _for_the_rest(request, chunks.position)
        session = box.clients.http(verify_ssl=_truth(config.get("verify_ssl", True)))
        follow = _truth(config.get("follow_redirects", True))
        try:
            async with answered(session, request, seconds=seconds, follow=follow) as response:
                body = _Body(response)
                rows = None
                if response.status < 400 and call.task.kind == self.kind:
                    rows = format or await _format_of(body, chunks, box)
                if rows is not None:
                    await _take_rows(body, rows, chunks, _where(request, box))
                answer = await _answer(body, call, box)
        except WebError as error:
            raise _unanswered(request, error, box) from None
        except ValueError as error:
            where = _where(request, box)
            raise _failed(f"{where} cannot be sent: {box.credentials.redact(str(error))}") from None
        elapsed = time.perf_counter() - started
        details = {"http": {"status": answer.status, "headers": answer.headers}}
        if answer.status >= 400:
            raise _refused(_where(request, box), answer, details, box)
        data: dict[str, Any] = {
            "status_code": answer.status,
            "headers": answer.headers,
            "url": answer.url,
            "elapsed": round(elapsed, 6),
            "data": answer.data,
        }
        if rows is not None:
            del data["data"]
            if chunks.position is not None:  # the rest of a body, which the playbook did not ask for
                details["http"]["status"] = data["status_code"] = HTTPStatus.OK.value
            return await chunks.result(data, details)
        if answer.encoding:
            data["encoding"] = answer.encoding
        return ToolResult(data=data, details=details)


async def _credential(call: ToolCall, box: Toolbox) -> Credential | None:
    try:
        return await box.credentials.resolve(call.auth, *sorted(HTTP_TYPES))
    except CredentialError as error:
        message = f"http in step {call.step}: {error}"
        raise ToolError(message, kind="credential", retryable=error.retryable) from None


def _access(credential: Credential | None) -> _Access:
    if credential is None:
        return _Access()
    base_url = credential.get("base_url", "url")
    access = _Access(base_url=str(base_url) if base_url else None)
    headers = credential.get("headers")
    if isinstance(headers, Mapping):
        access.headers.update({str(name): str(value) for name, value in headers.items()})
    token = credential.get("token", "access_token", "bearer_token")
    user = credential.get("username", "user")
    if credential.type is CredentialType.BEARER and token is None:
        raise ToolError(f"credential {credential.name!r} of type bearer has no 'token'", kind="credential")
    if credential.type in (CredentialType.BEARER, CredentialType.HTTP) and token is not None:
        access.headers["Authorization"] = f"Bearer {token}"
    elif user is not None and credential.type in (CredentialType.BASIC, CredentialType.HTTP):
        pair = f"{user}:{credential.get('password', default='')}"
        access.headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    elif credential.type is CredentialType.HEADER:
        name = str(credential.get("header", "header_name", "name", default="X-API-Key"))
        value = str(credential.get("value", "api_key", "key", "token", default=""))
        into = access.params if credential.get("in") == "query" else access.headers
        into[name] = value
    return access


def _absolute(url: Any, access: _Access, call: ToolCall) -> str:
    """The full address; a credential with its own address is sent nowhere else."""
    if not isinstance(url, str) or not (url or access.base_url):
        raise _failed(f"http in step {call.step} has no 'url'")
    if "://" not in url:
        if access.base_url is None:
            raise _failed(
                f"http in step {call.step}: url {url!r} is relative and no credential gives it a base; "
                "write http:// or https://, or name a credential with a url"
            )
        return f"{access.base_url.rstrip('/')}/{url.lstrip('/')}" if url else access.base_url
    if access.secret and access.base_url and not same_origin(URL(url), URL(access.base_url)):
        raise _failed(
            f"http in step {call.step}: the credential is for {public(URL(access.base_url))}, "
            f"not for {public(URL(url))}; use another credential for that address"
        )
    return url


def _request(url: str, access: _Access, config: Mapping[str, Any], box: Toolbox) -> Request:
    headers = {str(name): str(value) for name, value in (config.get("headers") or {}).items()}
    headers.update(access.headers)
    content, form = config.get("json"), config.get("form")
    body, kind = None, None
    if form is not None:
        body, kind = form_encoded(form), "application/x-www-form-urlencoded"
    elif isinstance(content, str | bytes):
        body = content.encode() if isinstance(content, str) else content
    elif content is not None:
        body, kind = orjson.dumps(to_jsonable(content, "json")), "application/json"
    if not any(name.lower() == TRACEPARENT for name in headers):
        headers.update(trace.headers())
    if kind is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = kind
    params = config.get("params") or {}
    target = address(url, {**params, **access.params} if access.params else params)
    if target.raw_user and any(name.lower() == "authorization" for name in headers):
        target = target.with_user(None)  # what the credential says, not what the address does
    redact = box.credentials.redact  # a header of the playbook's may hold a secret of the keychain
    secret = {name.lower() for name, value in headers.items() if redact(value) != value}
    secrets = frozenset(secret | {name.lower() for name in access.headers})
    return Request(_method(config), target, headers, body, secrets)


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("method") or "GET").upper()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back: ``data`` parsed, ``encoding`` where it is not what was sent; nothing secret in it."""

    status: int
    reason: str
    headers: dict[str, str]
    url: str
    data: Any
    text: str
    encoding: str | None


class _Body:
    """The body of a response, whose beginning can be looked at before it is taken.

    Attributes:
        has_ended: nothing follows the beginning.
    """

    def __init__(self, response: ClientResponse) -> None:
        self.response = response
        self.has_ended = False
        self._begun: list[bytes] = []
        self._size = 0
        self._following = response.content.iter_any()

    async def beginning(self, most: int) -> bytes:
        """All of it, or where it is longer than ``most`` bytes a few more than these."""
        while self._size <= most and not self.has_ended:
            block = await anext(self._following, None)
            if block is None:
                self.has_ended = True
            else:
                self._begun.append(block)
                self._size += len(block)
        if len(self._begun) > 1:
            self._begun = [b"".join(self._begun)]
        return self._begun[0] if self._begun else b""

    async def blocks(self) -> AsyncIterator[bytes]:
        """All of it, which is not kept."""
        begun, self._begun, self._size = self._begun, [], 0
        for block in begun:
            yield block
        async for block in self._following:
            yield block


async def _answer(body: _Body, call: ToolCall, box: Toolbox) -> _Answer:
    """Reads an answer, in memory as far as it may be there."""
    response = body.response
    redact = box.credentials.redact
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        key = name.lower()
        headers[key] = redact(f"{headers[key]}, {value}" if key in headers else value)
    content = await body.beginning(box.settings.http_body_bytes)
    failed = response.status >= 400
    if body.has_ended or failed:
        data, encoding = _body(content, response)
    else:
        data, encoding = await _stored(body, call, box), "reference"
    text = redact(_text(content, response))[:EXCERPT] if failed and encoding is None else ""
    url = redact(public(response.url))
    return _Answer(response.status, response.reason or "", headers, url, data, text, encoding)


def _format(call: ToolCall) -> RowFormat | None:
    """The format that the body has rows in, where the call says so."""
    given = call.config.get("format")
    if given is None or call.task.kind != HttpTool.kind:
        return None
    format = row_format(str(given), "")
    if format not in CUT_FORMATS:
        raise _failed(f"http in step {call.step}: format {format} is none of rows; write one of "
                      f"{', '.join(sorted(CUT_FORMATS))}, or leave it out for the body as one value")  # fmt: skip
    return format


async def _format_of(body: _Body, chunks: ChunkedResult, box: Toolbox) -> RowFormat | None:
    """The format that a body has rows in, by its type: of a JSON array, and of others where a step takes them."""
    media_type = _media_type(body.response)
    if media_type != "application/json" and not media_type.endswith("+json"):
        return _ROW_TYPES.get(media_type) if chunks.wanted else None
    if chunks.wanted:
        is_array = chunks.position is not None or begins_array(await body.beginning(_LOOK))
        return RowFormat.JSON if is_array else None
    beginning = await body.beginning(chunks.most_bytes)
    if begins_array(beginning) and not body.has_ended and not ends_value(beginning):
        beginning = await body.beginning(
            box.settings.http_body_bytes
        )  # a large value, which may be all there is
    is_array = not body.has_ended and begins_array(beginning) and ends_value(beginning)
    return RowFormat.JSON if is_array else None


def _for_the_rest(request: Request, position: Mapping[str, Any]) -> Request:
    """The request of what follows a position, or of the whole body where that is another one by now."""
    headers = {"Range": f"bytes={position['offset']}-", "If-Range": str(position["version"])}
    return replace(request, headers={**request.headers, **headers})


async def _take_rows(body: _Body, format: RowFormat, chunks: ChunkedResult, where: str) -> None:
    """Cuts the body into chunks as it comes, each stored before more is read than one further.

    Raises:
        ToolError: it is not of the format, or has changed.
        WebError: it broke off.
    """
    response, at = body.response, chunks.position
    if at is not None and not response.headers.get("Content-Range", "").startswith(f"bytes {at['offset']}-"):
        await chunks.begin_again()
        at = None
    version = at["version"] if at is not None else _version(response)
    cutter = cutter_for(format, chunks.most_bytes, at or {}, where, response.charset or "utf-8")

    def gathered(piece: Piece, *, full: bool) -> Gathered:
        position = {"offset": piece.offset, "version": version, "columns": cutter.columns}
        return Gathered(piece.rows, None if version is None else position, full)

    async for data in body.blocks():
        for piece in await asyncio.to_thread(list, cutter.feed(data)):
            await chunks.put(gathered(piece, full=True))
    if (rest := cutter.end()) is not None:
        await chunks.put(gathered(rest, full=False))


def _media_type(response: ClientResponse) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _version(response: ClientResponse) -> str | None:
    """What says of a later answer that it has the same bytes; None where a part of them cannot be asked for."""
    headers = response.headers
    if response.method != "GET" or "Content-Encoding" in headers or headers.get("Accept-Ranges") != "bytes":
        return None
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


async def _stored(body: _Body, call: ToolCall, box: Toolbox) -> dict[str, Any]:
    """The reference of a body that is stored while it comes."""
    spec = call.task.spec.result
    ref = await box.results.put_stream(
        body.blocks(),
        execution_id=call.execution_id,
        step=call.step,
        name=f"{spec.name or call.task.name}-body",
        spec=spec.model_copy(update={"name": None}),
        tier=box.settings.default_store_tier if spec.store in _NOT_STREAMED else None,
        content_type=_media_type(body.response) or "application/octet-stream",
    )
    return ref.model_dump(mode="json", exclude_defaults=True)


def _body(content: bytes, response: ClientResponse) -> tuple[Any, str | None]:
    if not content:
        return None, None
    content_type = response.headers.get("Content-Type", "").lower()
    if "json" in content_type or not content_type:
        try:
            return orjson.loads(content), None
        except orjson.JSONDecodeError:
            pass
    if "charset" in content_type or any(part in content_type for part in _TEXT_TYPES):
        return _text(content, response), None
    if not content_type:
        try:
            return content.decode(), None
        except UnicodeDecodeError:
            pass
    return base64.b64encode(content).decode(), "base64"


def _text(content: bytes, response: ClientResponse) -> str:
    try:
        return content.decode(response.charset or "utf-8", errors="replace")
    except LookupError:  # an encoding that nobody knows
        return content.decode(errors="replace")


def _refused(where: str, answer: _Answer, details: dict[str, Any], box: Toolbox) -> ToolError:
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


def _unanswered(request: Request, error: WebError, box: Toolbox) -> ToolError:
    said = f"timed out ({error})" if error.late else f"failed: {error}"
    kind: ErrorKind = "timeout" if error.late else "connection" if error.retryable else "client_error"
    text = box.credentials.redact(f"{_where(request, box)} {said}")
    return _failed(text, kind, retryable=error.retryable)


def _where(request: Request, box: Toolbox) -> str:
    return f"{request.method} {box.credentials.redact(public(request.url))}"


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds that a ``Retry-After`` header asks to wait: a number, or a date (RFC 9110, 10.2.3)."""
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


def _failed(message: str, kind: ErrorKind = "schema", *, retryable: bool = False) -> ToolError:
    return ToolError(message, kind=kind, retryable=retryable, details={"http": {"status": None}})


def _truth(value: Any) -> bool:
    return value.strip().lower() not in ("false", "0", "no", "") if isinstance(value, str) else bool(value)
