"""Who may call what, how often, and with how much: tokens with scopes, rate and size limits."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable
from enum import StrEnum
from fractions import Fraction
from typing import Annotated

import orjson
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from pydantic import SecretStr
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from noetl_dagster.errors import ServiceError
from noetl_dagster.service.problems import Problem, problem_response

LONGEST_WINDOW_SECONDS = 60
"""A rate that is no whole number is counted over the few seconds in which it is one, or nearly."""


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


def requires(*allowed: Scope) -> Callable[[Request, HTTPAuthorizationCredentials | None], None]:
    """A dependency that lets through tokens with one of the scopes."""

    def check(request: Request, bearer: Bearer) -> None:
        tokens: Tokens = request.app.state.tokens
        if not tokens.required:
            return
        scopes = tokens.scopes_of(bearer.credentials) if bearer is not None else None
        if scopes is None:
            raise Problem(
                401, "a bearer token of NOETL_SERVICE_TOKENS is needed", {"www-authenticate": "Bearer"}
            )
        if not scopes.intersection(allowed):
            raise Problem(403, f"the token lacks the scope {' or '.join(allowed)}")

    return check


FOR_WORKERS = Depends(requires(Scope.WORKER))
FOR_OPERATORS = Depends(requires(Scope.OPERATOR))
FOR_READERS = Depends(requires(Scope.READER, Scope.OPERATOR))
FOR_ALL = Depends(requires(Scope.READER, Scope.OPERATOR, Scope.WORKER))


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
        self._limit = _limit(rate)
        # not the library's asyncio storage: that looks through all clients at every request
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        wait = self._wait(_client(scope, headers))
        if wait > 0:
            detail = f"more than {self._rate:g} requests a second"
            response = problem_response(429, detail, {"retry-after": f"{wait:.3f}"})
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._body_bytes:
            await self._too_large(scope, receive, send)
            return
        await self._count(scope, receive, send)

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

    def _wait(self, client: str) -> float:
        """Counts one request of a client; seconds until there is room for it when there is none."""
        if self._limiter.hit(self._limit, client):
            return 0.0
        reset, _ = self._limiter.get_window_stats(self._limit, client)
        return max(reset - time.time(), 0.001)


def _limit(rate: float) -> RateLimitItem:
    """A rate as whole requests in whole seconds."""
    if rate < 1:
        return RateLimitItemPerSecond(1, math.ceil(1 / rate))
    share = Fraction(rate).limit_denominator(LONGEST_WINDOW_SECONDS)
    return RateLimitItemPerSecond(share.numerator, share.denominator)


def _client(scope: AsgiScope, headers: dict[bytes, bytes]) -> str:
    token = headers.get(b"authorization")
    if token is not None:
        return _digest(token.decode("latin-1"))
    return str((scope.get("client") or ("unknown",))[0])


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
