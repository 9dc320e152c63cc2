"""Who may call what, how often, and with how much: tokens with scopes, rate and size limits."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from enum import StrEnum
from fractions import Fraction
from typing import Annotated

import orjson
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from noetl_dagster.errors import ServiceError
from noetl_dagster.service.problems import Problem, problem_response

LONGEST_WINDOW_SECONDS = 60
"""A rate that is no whole number is counted over the few seconds in which it is one, or nearly."""

FEWEST_SWEPT = 1_000
"""Fewer clients than this are remembered without a look at whether they still come."""


class Scope(StrEnum):
    """What a token may do. Scopes do not include each other."""

    WORKER = "worker"
    OPERATOR = "operator"
    READER = "reader"


class Tokens:
    """The tokens of the service, kept as digests. Without any, everybody may do everything."""

    def __init__(self, scopes: dict[str, frozenset[Scope]]) -> None:
        self._scopes = {_digest(token): granted for token, granted in scopes.items()}

    @classmethod
    def parse(cls, text: SecretStr | None) -> Tokens:
        """The setting ``NOETL_SERVICE_TOKENS``.

        Raises:
            ServiceError: it is not ``{"<token>": ["<scope>", ...]}``; the message holds no token.
        """
        if text is None:
            return cls({})
        try:
            given = orjson.loads(text.get_secret_value())
            return cls({str(token): frozenset(map(Scope, scopes)) for token, scopes in given.items()})
        except (ValueError, AttributeError, TypeError):
            known = ", ".join(Scope)
            raise ServiceError(
                f'NOETL_SERVICE_TOKENS is not JSON {{"<token>": ["<scope>", ...]}} with scopes of {known}'
            ) from None

    @property
    def required(self) -> bool:
        return bool(self._scopes)

    def scopes_of(self, token: str) -> frozenset[Scope] | None:
        """The scopes of a token; None when it is unknown. Comparing digests leaks nothing about tokens."""
        return self._scopes.get(_digest(token))


_bearer = HTTPBearer(auto_error=False, description="A token of NOETL_SERVICE_TOKENS")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


class Requires:
    """A dependency that lets through tokens with one of the scopes."""

    def __init__(self, *allowed: Scope) -> None:
        self._allowed = frozenset(allowed)
        self._names = " or ".join(allowed)

    async def __call__(self, request: Request, bearer: Bearer) -> None:  # async: else FastAPI takes a thread
        tokens: Tokens = request.app.state.tokens
        if tokens.required:
            self.check(tokens, bearer.credentials if bearer is not None else None)

    def check(self, tokens: Tokens, token: str | None) -> None:
        """
        Raises:
            Problem: 401 for no token or an unknown one, 403 for one without the scope.
        """
        scopes = tokens.scopes_of(token) if token is not None else None
        if scopes is None:
            raise Problem(
                401, "a bearer token of NOETL_SERVICE_TOKENS is needed", {"www-authenticate": "Bearer"}
            )
        if scopes.isdisjoint(self._allowed):
            raise Problem(403, f"the token lacks the scope {self._names}")


FOR_WORKERS = Depends(Requires(Scope.WORKER))
FOR_OPERATORS = Depends(Requires(Scope.OPERATOR))
FOR_READERS = Depends(Requires(Scope.READER, Scope.OPERATOR))
FOR_ALL = Depends(Requires(Scope.READER, Scope.OPERATOR, Scope.WORKER))


class Limits:
    """ASGI middleware: refuses bodies above a size (413) and clients above a rate (429).

    Args:
        body_bytes: largest request body.
        rate: requests a second of one client, by token or address; a second's may come at once.
    """

    def __init__(self, app: ASGIApp, *, body_bytes: int, rate: float) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._rate = rate
        self._windows = Windows(rate)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        wait = self._windows.count(_client(scope, headers), time.monotonic())
        if wait > 0:
            detail = f"more than {self._rate:g} requests a second"
            response = problem_response(429, detail, {"retry-after": f"{wait:.3f}"})
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or b"transfer-encoding" in headers:
            await self._count(scope, receive, send)
        elif int(length) > self._body_bytes:
            await self._too_large(scope, receive, send)
        else:  # the server reads no more of a body than its length says
            await self._app(scope, receive, send)

    async def _count(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Passes a body on while it is within the limit; a larger one ends here, whatever the rest answers."""
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

    async def _too_large(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        detail = f"the body is larger than {self._body_bytes} bytes"
        await problem_response(413, detail)(scope, receive, send)


class Windows:
    """Counts requests of each client; a client's window begins with a request and lasts some seconds."""

    def __init__(self, rate: float) -> None:
        self._requests, self._seconds = _whole(rate)
        self._open: dict[str, tuple[float, int]] = {}
        self._sweep_at = FEWEST_SWEPT

    def count(self, client: str, now: float) -> float:
        """Counts one request; seconds until there is room for it when there is none."""
        ends, counted = self._open.get(client, (now, 0))
        if now >= ends:
            self._sweep(now)
            ends, counted = now + self._seconds, 0
        if counted >= self._requests:
            return ends - now
        self._open[client] = ends, counted + 1
        return 0.0

    def _sweep(self, now: float) -> None:
        """Forgets windows that have ended, each time that they may have become half of all."""
        if len(self._open) >= self._sweep_at:
            self._open = {client: window for client, window in self._open.items() if window[0] > now}
            self._sweep_at = max(2 * len(self._open), FEWEST_SWEPT)


def _whole(rate: float) -> tuple[int, int]:
    """A rate as whole requests in whole seconds."""
    if rate < 1:
        return 1, math.ceil(1 / rate)
    share = Fraction(rate).limit_denominator(LONGEST_WINDOW_SECONDS)
    return share.numerator, share.denominator


def _client(scope: AsgiScope, headers: dict[bytes, bytes]) -> str:
    token = headers.get(b"authorization")
    if token is not None:
        return _digest(token.decode("latin-1"))
    return str((scope.get("client") or ("unknown",))[0])


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
