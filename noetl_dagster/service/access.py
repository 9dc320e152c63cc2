"""Access to the API: tokens with scopes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import unquote

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import cookie_parser

from noetl_dagster.service.problems import ApiProblem
from noetl_dagster.service.tokens import Principal, Tokens, TokenScope

_bearer = HTTPBearer(auto_error=False, description="A token of NOETL_SERVICE_TOKENS")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


class Requires:
    """A dependency that accepts tokens with one of the scopes, whose ``names`` messages and pages show."""

    def __init__(self, *allowed: TokenScope) -> None:
        self._allowed = frozenset(allowed)
        self.names = " or ".join(allowed)

    async def __call__(self, request: Request, bearer: Bearer) -> Principal:
        """Checks the token of a request and returns its sender; async, so that FastAPI needs no thread."""
        return self.check(request.app.state.tokens, bearer.credentials if bearer is not None else None)

    def check(self, tokens: Tokens, token: str | None) -> Principal:
        """Returns the sender; raises 401 for a missing or unknown token, and 403 for one without the scope."""
        principal = tokens.principal(token)
        if principal is None:
            raise without_token()
        if principal.scopes.isdisjoint(self._allowed):
            raise ApiProblem(403, f"the token lacks the scope {self.names}")
        return principal


FOR_WORKERS = Depends(Requires(TokenScope.WORKER))
FOR_OPERATORS = Depends(Requires(TokenScope.OPERATOR))
FOR_READERS = Depends(Requires(TokenScope.READER, TokenScope.OPERATOR))
FOR_ALL = Depends(Requires(TokenScope.READER, TokenScope.OPERATOR, TokenScope.WORKER))

Worker = Annotated[Principal, FOR_WORKERS]
Anyone = Annotated[Principal, FOR_ALL]
"""The sender of a request that workers may send; readers and operators may send it too."""


def without_token() -> ApiProblem:
    """Returns the problem of a request with a missing or unknown token."""
    return ApiProblem(401, "a bearer token of NOETL_SERVICE_TOKENS is needed", {"www-authenticate": "Bearer"})


def bearer_token(headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the bearer token of a request's headers; None without one."""
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


TOKEN_COOKIE = "noetl_token"


def token_in(headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the token of a request for a page: the bearer token, or that of the cookie."""
    return bearer_token(headers) or cookies(headers).get(TOKEN_COOKIE)


def cookies(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Returns the cookies of a request as browsers read them: those of other services may have any characters."""
    values = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
    return {name: unquote(value) for name, value in values.items()}
