"""Checks of every request before its body is read: rates, tokens, other sites, content types and sizes."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from collections.abc import Collection, Mapping
from urllib.parse import quote

from fastapi import Security
from fastapi.security import APIKeyHeader
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.service.access import Requires, bearer_token, token_in, without_token
from noetl_dagster.service.problems import ApiProblem, problem_of, problem_response
from noetl_dagster.service.tokens import Tokens, TokenScope

FEWEST_SWEPT = 1_000
"""Number of clients from which on idle ones are removed."""

API = "/api/"
"""Paths that only programs request. A browser may open other paths from a link on another site."""

OPEN = frozenset({"/health", "/ready", "/login"})
"""Paths that need no token."""

STATIC = "/static/"
"""Files of the pages, which everyone may read."""

PAGES = re.compile(r"/(?:(?:executions|compare|playbooks|workers|dead-letters|login|logout)(?:/.*)?)?")
"""Paths for people with a browser, which sends the token in a cookie."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""

OWN_SITE = (None, b"same-origin", b"none")
"""Values of ``Sec-Fetch-Site`` for requests of no browser, of the API's own pages, and of the address bar."""

_JSON = re.compile(rb"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_FORM = re.compile(rb"\s*application/x-www-form-urlencoded\s*(?:;|$)", re.IGNORECASE)
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}

READS = Requires(TokenScope.READER, TokenScope.OPERATOR)

DECLARES_CLIENT = Security(
    APIKeyHeader(name=CLIENT_HEADER, auto_error=False, description="The name of your program, any text")
)
"""Adds the header to ``/openapi.json``; :class:`RequestChecks` requires it."""


class RequestChecks:
    """ASGI middleware: refuses a request before its body is read.

    - above the rate of its client: 429. A client is a token that the service knows, else an address
    - from a page of another site: 403
    - without a token that the service knows, if it has tokens: 401; a page sends the browser to ``/login``
    - below ``/api`` without the header ``X-NoETL-Client``, if the service has no tokens: 403. Neither a form nor a
      redirect can set it, and a script on another site needs a permission that the service does not give
    - that changes something with a content type other than JSON, which a form cannot send: 415. The forms of pages
      have a field that other sites do not know
    - with a body above a size: 413

    Args:
        for_readers: paths outside of the API that need the scope of readers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        body_bytes: int,
        rate: float,
        for_readers: Collection[str] = (),
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._needs_token = tokens.required
        self._for_readers = frozenset(for_readers)
        self._body_bytes = body_bytes
        self._too_large = problem_response(413, f"the body is larger than {body_bytes} bytes")
        self._rate = rate
        self._clients = ClientRates(rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check(scope, headers)
        except ApiProblem as problem:
            answer = problem_of(problem, "")
            if problem.status_code == 401 and scope["method"] in SAFE_METHODS and PAGES.fullmatch(scope["path"]):
                answer = RedirectResponse(f"/login?next={quote(wanted(scope))}", 303)
            await answer(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or b"transfer-encoding" in headers:
            await self._count_body(scope, receive, send)
        elif int(length) > self._body_bytes:
            await self._too_large(scope, receive, send)
        else:  # the server reads no more of a body than its length
            await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises the problem of a request that is refused."""
        path: str = scope["path"]
        is_page = PAGES.fullmatch(path) is not None
        token = None
        if self._needs_token:
            token = token_in(headers) if is_page else bearer_token(headers)
        is_known = self._tokens.principal(token) is not None
        client = address_of(scope) if token is None or not is_known else hash(token)
        wait = self._clients.count(client, time.monotonic())
        if wait > 0:
            raise ApiProblem(429, f"more than {self._rate:g} requests a second", {"retry-after": f"{wait:.3f}"})
        changes, is_api = scope["method"] not in SAFE_METHODS, path.startswith(API)
        if changes or is_api:
            refuse_other_sites(headers)
        if not is_known and path not in OPEN and not path.startswith(STATIC):
            raise without_token()
        if path in self._for_readers:
            READS.check(self._tokens, token)
        if is_api and not self._needs_token and not headers.get(_CLIENT):
            raise ApiProblem(
                403,
                f"the header {CLIENT_HEADER} is needed: send the name of your program, "
                f"as curl -H '{CLIENT_HEADER}: curl'",
            )
        expected = _FORM if is_page else _JSON
        if changes and not expected.match(headers.get(b"content-type", b"")):
            if is_page:
                raise ApiProblem(415, "a form of a page is needed; programs use /api")
            raise ApiProblem(415, "a body of JSON is needed, with content-type: application/json")

    async def _count_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a body on while it is within the limit; beyond, 413 replaces an answer that has not begun."""
        taken = 0
        answered = False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message if taken <= self._body_bytes else {"type": "http.disconnect"}

        async def guarded(message: Message) -> None:
            nonlocal answered
            if taken <= self._body_bytes or answered:
                answered = True
                await send(message)

        with contextlib.suppress(ClientDisconnect):
            await self._app(scope, counted, guarded)
        if not answered:
            await self._too_large(scope, receive, send)


_CLIENT = CLIENT_HEADER.lower().encode()


def refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Raises 403 for a request that a browser sends for a page of another site (Fetch, ``Sec-Fetch-Site``)."""
    if headers.get(b"sec-fetch-site") not in OWN_SITE:
        raise ApiProblem(403, "requests from pages of other sites are refused (Sec-Fetch-Site)")
    origin = headers.get(b"origin")
    if origin is not None and not _is_own(origin, headers.get(b"host", b"")):
        raise ApiProblem(403, "requests from pages of other sites are refused (Origin)")


def wanted(scope: Scope) -> str:
    """Returns the path and query of a request."""
    query = scope["query_string"].decode("latin-1")
    return str(scope["path"]) + (f"?{query}" if query else "")


def _is_own(origin: bytes, host: bytes) -> bool:
    scheme, _, place = origin.lower().partition(b"://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and place.removesuffix(port) == host.lower().removesuffix(port) != b""


class ClientRates:
    """Limits the requests of each client: those of one second may come at once, and the allowance refills steadily.

    The generic cell rate algorithm stores for each client the time at which the rate covers its requests so far.
    """

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._burst = max(1.0, self._interval) + self._interval / 1_000  # rounding refuses no request
        self._covered_at: dict[str | int, float] = {}
        self._sweep_at = FEWEST_SWEPT

    def count(self, client: str | int, now: float) -> float:
        """Counts one request; returns 0, or the seconds until the next one if the client is above the rate."""
        covered_at = max(self._covered_at.get(client, now), now) + self._interval
        if covered_at - now > self._burst:
            return covered_at - now - self._burst
        self._covered_at[client] = covered_at
        if len(self._covered_at) >= self._sweep_at:  # each time that half of them may be idle
            self._covered_at = {name: at for name, at in self._covered_at.items() if at > now}
            self._sweep_at = max(2 * len(self._covered_at), FEWEST_SWEPT)
        return 0.0


def address_of(scope: Scope) -> str:
    """Returns the address of a request's client; of IPv6 the network of 64 bits, which one client may have."""
    address = str((scope.get("client") or ("unknown",))[0])
    if ":" in address:
        with contextlib.suppress(ValueError):
            network = ipaddress.IPv6Address(address)
            if network.ipv4_mapped is None:
                return network.exploded[:19]
    return address
