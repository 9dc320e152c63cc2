"""The request of an ``http`` task: its address, credential, headers and body."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from yarl import URL

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError
from noetl_dagster.process.tracing import trace
from noetl_dagster.process.tracing.spans import TRACEPARENT
from noetl_dagster.tools.access.credentials import HTTP_TYPES, Credential, CredentialType
from noetl_dagster.tools.access.web import HttpRequest, address, form_encoded, public, same_origin
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.jsonable import to_jsonable


@dataclass(slots=True)
class CredentialFields:
    """The headers and parameters that a credential adds to a request.

    Attributes:
        base_url: the only origin that may receive them; None: the first one that is asked.
    """

    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    base_url: str | None = None

    @property
    def secret(self) -> bool:
        """Reports whether the credential adds anything."""
        return bool(self.headers or self.params)


async def find_credential(call: ToolCall, box: Toolbox) -> Credential | None:
    """Returns the credential that the task names, or None.

    Raises:
        ToolError: it is not found or of another type.
    """
    try:
        return await box.credentials.resolve(call.auth, *sorted(HTTP_TYPES))
    except CredentialError as error:
        message = f"http in step {call.step}: {error}"
        raise ToolError(message, kind="credential", retryable=error.retryable) from None


def fields_of(credential: Credential | None) -> CredentialFields:
    """Returns the headers and parameters for a credential; none without one."""
    if credential is None:
        return CredentialFields()
    base_url = credential.get("base_url", "url")
    access = CredentialFields(base_url=str(base_url) if base_url else None)
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


def absolute_url(url: Any, access: CredentialFields, call: ToolCall) -> str:
    """Returns the full address. A credential with its own address is sent nowhere else."""
    if not isinstance(url, str) or not (url or access.base_url):
        raise http_error(f"http in step {call.step} has no 'url'")
    if "://" not in url:
        if access.base_url is None:
            raise http_error(
                f"http in step {call.step}: url {url!r} is relative and no credential gives it a base; "
                "write http:// or https://, or name a credential with a url"
            )
        return f"{access.base_url.rstrip('/')}/{url.lstrip('/')}" if url else access.base_url
    if access.secret and access.base_url and not same_origin(URL(url), URL(access.base_url)):
        raise http_error(
            f"http in step {call.step}: the credential is for {public(URL(access.base_url))}, "
            f"not for {public(URL(url))}; use another credential for that address"
        )
    return url


def build_request(url: str, access: CredentialFields, config: Mapping[str, Any], box: Toolbox) -> HttpRequest:
    """Returns the request that the task's fields describe.

    Raises:
        NotJsonableError, ValueError: a field cannot be sent.
    """
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
        target = target.with_user(None)  # the credential takes precedence over the address
    redact = box.credentials.redact  # a header of the playbook may contain a secret of the keychain
    secret = {name.lower() for name, value in headers.items() if redact(value) != value}
    secrets = frozenset(secret | {name.lower() for name in access.headers})
    return HttpRequest(method_of(config), target, headers, body, secrets)


def method_of(config: Mapping[str, Any]) -> str:
    """Returns the method, in capitals."""
    return str(config.get("method") or "GET").upper()


def request_for_rest(request: HttpRequest, position: Mapping[str, Any]) -> HttpRequest:
    """Returns the request for the bytes after a position, or for the whole body if that has changed since."""
    headers = {"Range": f"bytes={position['offset']}-", "If-Range": str(position["version"])}
    return replace(request, headers={**request.headers, **headers})


def place_of(request: HttpRequest, box: Toolbox) -> str:
    """Returns method and address for messages, without secrets."""
    return f"{request.method} {box.credentials.redact(public(request.url))}"


def http_error(message: str, kind: ErrorKind = "schema", *, retryable: bool = False) -> ToolError:
    """Returns the error of a request without a response."""
    return ToolError(message, kind=kind, retryable=retryable, details={"http": {"status": None}})
