"""Access to the API: tokens with scopes, limits on the rate of requests and on their size."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noetl_dagster.service.problems import ApiProblem, problem_response
from noetl_dagster.service.tokens import Principal, Tokens, TokenScope, digest

FEWEST_SWEPT = 1_000
"""Number of clients from which on idle ones are removed."""


_bearer = HTTPBearer(auto_error=False, description="A token of NOETL_SERVICE_TOKENS")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


class Requires:
    """A dependency that accepts tokens with one of the scopes."""

    def __init__(self, *allowed: TokenScope) -> None:
        self._allowed = frozenset(allowed)
        self._names = " or ".join(allowed)

    async def __call__(self, request: Request, bearer: Bearer) -> Principal:
        """Checks the token of a request and returns its sender; async, so that FastAPI needs no thread."""
        return self.check(request.app.state.tokens, bearer.credentials if bearer is not None else None)

    def check(self, tokens: Tokens, token: str | None) -> Principal:
        """Returns the sender; raises 401 for a missing or unknown token, and 403 for one without the scope."""
        principal = tokens.principal(token)
        if principal is None:
            headers = {"www-authenticate": "Bearer"}
            raise ApiProblem(401, "a bearer token of NOETL_SERVICE_TOKENS is needed", headers)
        if principal.scopes.isdisjoint(self._allowed):
            raise ApiProblem(403, f"the token lacks the scope {self._names}")
        return principal


FOR_WORKERS = Depends(Requires(TokenScope.WORKER))
FOR_OPERATORS = Depends(Requires(TokenScope.OPERATOR))
FOR_READERS = Depends(Requires(TokenScope.READER, TokenScope.OPERATOR))
FOR_ALL = Depends(Requires(TokenScope.READER, TokenScope.OPERATOR, TokenScope.WORKER))

Worker = Annotated[Principal, FOR_WORKERS]
Anyone = Annotated[Principal, FOR_ALL]
"""The sender of a request that workers may send; readers and operators may send it too."""


class Limits:
    """ASGI middleware: refuses bodies above a size (413), and clients (tokens or addresses) above a rate (429)."""

    def __init__(self, app: ASGIApp, *, body_bytes: int, rate: float) -> None:
        self._app = app
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
        wait = self._clients.count(_client(scope, headers), time.monotonic())
        if wait > 0:
            detail = f"more than {self._rate:g} requests a second"
            response = problem_response(429, detail, {"retry-after": f"{wait:.3f}"})
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or b"transfer-encoding" in headers:
            await self._count_body(scope, receive, send)
        elif int(length) > self._body_bytes:
            await self._too_large(scope, receive, send)
        else:  # the server reads no more of a body than its length
            await self._app(scope, receive, send)

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


class ClientRates:
    """Limits the requests of each client: those of one second may come at once, and the allowance refills steadily.

    The generic cell rate algorithm stores for each client the time at which the rate covers its requests so far.
    """

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._burst = max(1.0, self._interval) + self._interval / 1_000  # rounding refuses no request
        self._covered_at: dict[str, float] = {}
        self._sweep_at = FEWEST_SWEPT

    def count(self, client: str, now: float) -> float:
        """Counts one request; returns 0, or the seconds until the next one if the client is above the rate."""
        covered_at = max(self._covered_at.get(client, now), now) + self._interval
        if covered_at - now > self._burst:
            return covered_at - now - self._burst
        self._covered_at[client] = covered_at
        if len(self._covered_at) >= self._sweep_at:  # each time that half of them may be idle
            self._covered_at = {name: at for name, at in self._covered_at.items() if at > now}
            self._sweep_at = max(2 * len(self._covered_at), FEWEST_SWEPT)
        return 0.0


def _client(scope: Scope, headers: dict[bytes, bytes]) -> str:
    token = headers.get(b"authorization")
    if token is not None:
        return digest(token.decode("latin-1"))
    return str((scope.get("client") or ("unknown",))[0])
