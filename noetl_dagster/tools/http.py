"""``kind: http``: one request, with authentication by credential and an honest error envelope."""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import orjson

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.tools.access.credentials import HTTP_TYPES, Credential, CredentialType
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable

DEFAULT_SECONDS = 30.0
MAX_REDIRECTS = 20
EXCERPT = 300
RETRYABLE_STATUSES = frozenset({408, 425, 429})
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
    else the text; other bodies are base64 text and ``encoding: base64`` stands beside ``data``.

    Raises ``ToolError`` of kind ``http`` for a status from 400 on and for connections that fail. Retryable
    are 408, 425, 429, 5xx, connection errors and time-outs; ``retry_after`` carries the server's wish.
    """

    kind = "http"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        config = call.config
        access = _access(await _credential(call, box))
        url = _absolute(config.get("url"), access, call)
        client = box.clients.http(verify_ssl=_truth(config.get("verify_ssl", True)))
        method = str(config.get("method") or "GET").upper()
        where = f"{method} {box.credentials.redact(_public(httpx.URL(url)))}"
        started = time.perf_counter()
        try:
            request = _request(client, method, url, access, config)
            response = await _send(client, request, access, _truth(config.get("follow_redirects", True)))
        except httpx.TimeoutException as error:
            raise _failed(f"{where} timed out ({type(error).__name__})", retryable=True) from None
        except (httpx.TransportError, httpx.TooManyRedirects) as error:
            text = box.credentials.redact(f"{where} failed: {type(error).__name__}: {error}")
            raise _failed(text, retryable=isinstance(error, httpx.TransportError)) from None
        except (httpx.InvalidURL, NotJsonableError, ValueError) as error:
            raise _failed(f"{where} cannot be sent: {box.credentials.redact(str(error))}") from None
        elapsed = time.perf_counter() - started
        headers = {name: box.credentials.redact(value) for name, value in response.headers.items()}
        details = {"http": {"status": response.status_code, "headers": headers}}
        if response.status_code >= 400:
            raise _refused(where, response, details, box)
        body, encoding = _body(response)
        data: dict[str, Any] = {
            "status_code": response.status_code,
            "headers": headers,
            "url": box.credentials.redact(_public(response.url)),
            "elapsed": round(elapsed, 6),
            "data": body,
        }
        if encoding:
            data["encoding"] = encoding
        return ToolResult(data=data, details=details)


async def _credential(call: ToolCall, box: Toolbox) -> Credential | None:
    try:
        return await box.credentials.resolve(call.auth, *sorted(HTTP_TYPES))
    except CredentialError as error:
        raise ToolError(f"http in step {call.step}: {error}", kind="credential") from None


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
    if access.secret and access.base_url and _origin(httpx.URL(url)) != _origin(httpx.URL(access.base_url)):
        raise _failed(
            f"http in step {call.step}: the credential is for {_public(httpx.URL(access.base_url))}, "
            f"not for {_public(httpx.URL(url))}; use another credential for that address"
        )
    return url


def _request(
    client: httpx.AsyncClient, method: str, url: str, access: _Access, config: Mapping[str, Any]
) -> httpx.Request:
    headers = {str(name): str(value) for name, value in (config.get("headers") or {}).items()}
    headers.update(access.headers)
    content, form = config.get("json"), config.get("form")
    body: dict[str, Any] = {}
    if form is not None:
        body["data"] = {str(key): value for key, value in form.items()}
    elif isinstance(content, str | bytes):
        body["content"] = content
    elif content is not None:
        body["content"] = orjson.dumps(to_jsonable(content, "json"))
        if not any(name.lower() == "content-type" for name in headers):
            headers["Content-Type"] = "application/json"
    address = httpx.URL(url)
    params = {**_params(config.get("params")), **access.params}
    if params:
        address = address.copy_merge_params(params)
    timeout = float(config.get("timeout") or DEFAULT_SECONDS)
    return client.build_request(method, address, headers=headers, timeout=timeout, **body)


def _params(params: Any) -> dict[str, Any]:
    """Query parameters; null leaves one out, true and false are written as JSON does."""
    found: dict[str, Any] = {}
    for name, value in (params or {}).items():
        if value is None:
            continue
        found[str(name)] = list(value) if isinstance(value, list | tuple) else value
    return found


async def _send(
    client: httpx.AsyncClient, request: httpx.Request, access: _Access, follow: bool
) -> httpx.Response:
    """Sends, following redirects; what the credential added does not go to another origin."""
    first = _origin(request.url)
    response = await client.send(request, follow_redirects=False)
    redirects = 0
    while follow and response.next_request is not None:
        redirects += 1
        if redirects > MAX_REDIRECTS:
            raise httpx.TooManyRedirects(f"more than {MAX_REDIRECTS} redirects", request=request)
        request = response.next_request
        if _origin(request.url) != first:
            for name in access.headers:
                request.headers.pop(name, None)
        response = await client.send(request, follow_redirects=False)
    return response


def _body(response: httpx.Response) -> tuple[Any, str | None]:
    content = response.content
    if not content:
        return None, None
    content_type = response.headers.get("content-type", "").lower()
    if "json" in content_type or not content_type:
        try:
            return orjson.loads(content), None
        except orjson.JSONDecodeError:
            pass
    if "charset" in content_type or any(part in content_type for part in _TEXT_TYPES):
        return response.text, None
    if not content_type:
        try:
            return content.decode(), None
        except UnicodeDecodeError:
            pass
    return base64.b64encode(content).decode(), "base64"


def _refused(where: str, response: httpx.Response, details: dict[str, Any], box: Toolbox) -> ToolError:
    status = response.status_code
    _, encoding = _body(response)
    excerpt = "" if encoding else box.credentials.redact(response.text[:EXCERPT])
    if excerpt:
        details["http"]["body"] = excerpt
    return ToolError(
        f"{where} answered {status} {response.reason_phrase}{': ' if excerpt else ''}{excerpt}",
        kind="http",
        retryable=status in RETRYABLE_STATUSES or status >= 500,
        status=status,
        code=str(status),
        details=details,
        retry_after=retry_after_seconds(response.headers.get("retry-after")),
    )


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


def _failed(message: str, *, retryable: bool = False) -> ToolError:
    return ToolError(message, kind="http", retryable=retryable, details={"http": {"status": None}})


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _public(url: httpx.URL) -> str:
    """An address without user name and password."""
    return str(url.copy_with(username=None, password=None)) if url.userinfo else str(url)


def _truth(value: Any) -> bool:
    return value.strip().lower() not in ("false", "0", "no", "") if isinstance(value, str) else bool(value)
