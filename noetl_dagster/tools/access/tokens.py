"""Tokens that expire: requested once for all that need them, and again shortly before they expire.

The tasks of a process share one request. With ``NOETL_CREDENTIAL_KEY``, all processes share the token as well, through
``noetl.keychain``, where it is encrypted as credentials are.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
import orjson

from noetl_dagster.errors import CredentialError, ErrorKind, kind_of_status
from noetl_dagster.process.redaction import MASK, SECRETS, named_secrets
from noetl_dagster.tools.access.encryption import Encryption

if TYPE_CHECKING:
    from noetl_dagster.tools.access.web import Web

OF_ANY_EXECUTION = 0

ASK_SECONDS = 30.0
LIFE_SECONDS = 3_600.0  # of a token that does not say when it expires
LONGEST_LIFE_SECONDS = 30 * 86_400.0
MARGIN = 0.1  # a token is renewed when this part of its life is left
LONGEST_MARGIN_SECONDS = 30.0  # or so many seconds
REFRESH_LIFE_SECONDS = 90 * 86_400.0  # for which a rotated refresh token is stored
MOST_KEPT = 1_000
_MESSAGE = 300  # characters of a server's message

_LOCK = "SELECT pg_advisory_xact_lock(hashtext('noetl.keychain'), hashtext($1))"
_GET = """
SELECT data, extract(epoch FROM expires_at - now())::float8 AS seconds FROM noetl.keychain
WHERE name = $1 AND execution_id = $2 AND expires_at > now()
"""
_PUT = """
INSERT INTO noetl.keychain (name, execution_id, data, expires_at)
VALUES ($1, $2, $3, now() + make_interval(secs => $4))
ON CONFLICT (name, execution_id) DO UPDATE
SET data = EXCLUDED.data, expires_at = EXCLUDED.expires_at, created_at = now()
"""
_FORGET = "DELETE FROM noetl.keychain WHERE name = $1 AND execution_id = $2"

Fields = Mapping[str, Any]


class HttpClients(Protocol):
    """Gives the HTTP sessions of the process."""

    @property
    def body_bytes(self) -> int:
        """The largest body that is read whole."""

    def http(self) -> Web:
        """Returns the shared HTTP sessions."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request for a token.

    Attributes:
        name: of the credential or keychain entry.
        what: the same with its sort, for messages.
        identity: distinguishes tokens: requests with the same identity share one.
        url: of the token server.
        compose: returns headers and body; its argument is the refresh token that the server issued last, None if the
            credential's own is still valid.
        secrets: values that the server's messages may repeat.
        wanted: the field of the answer that has to hold the token; empty: any JSON object is one.
        rotates: whether the server may replace the refresh token.
        is_shared: whether processes may share the token, which is not that of the machine.
        life_seconds: of a token that does not say when it expires; default: an hour.
        advice: for an error about the client.
    """

    name: str
    what: str
    identity: bytes = field(repr=False)
    url: str
    compose: Callable[[str | None], tuple[dict[str, str], bytes | None]] = field(repr=False)
    method: str = "POST"
    secrets: tuple[str, ...] = field(default=(), repr=False)
    wanted: str = ""
    rotates: bool = False
    is_shared: bool = True
    life_seconds: float | None = None
    advice: str = ""

    @property
    def place(self) -> str:
        """The credential and the server's address without its query, for messages."""
        return f"{self.what}: {_shown(self.url)}"


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a server issued, with the other fields of its answer."""

    key: tuple[str, int]
    fields: Fields = field(repr=False)
    until: float
    secrets: list[str] = field(repr=False)


class TokenCache:
    """The tokens of a process.

    Args:
        encryption: encrypts stored tokens; without its key they stay in memory.
        pool: of the database with ``noetl.keychain``; None: tokens stay in memory.
        clients: sends the requests; None: no token can be requested.
    """

    def __init__(self, encryption: Encryption, pool: asyncpg.Pool | None, clients: HttpClients | None) -> None:
        self._encryption = encryption
        self._pool = pool if encryption.has_key else None
        self._clients = clients
        self._tokens: dict[tuple[str, int], Token] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[Token]] = {}
        self._rejected: dict[tuple[str, int], Fields] = {}
        self._rotated: dict[tuple[str, int], str] = {}

    def shares(self, request: TokenRequest) -> bool:
        """Reports whether processes share the token of a request."""
        return self._pool is not None and request.is_shared

    async def get(self, request: TokenRequest, owner: int = OF_ANY_EXECUTION) -> tuple[Token, bool]:
        """Returns a valid token, and whether it was issued before this call.

        Args:
            owner: the execution that has the token for itself.

        Raises:
            CredentialError: the server refuses it (kind ``auth``) or does not answer. The next call asks again.
        """
        key = (f"{request.name}:{self._encryption.digest(request.identity)}", owner)
        token = self._tokens.get(key)
        if token is not None and time.monotonic() < token.until:
            SECRETS.hide(*token.secrets)
            return token, True
        asking = self._asking.get(key)
        if asking is None or asking.get_loop() is not asyncio.get_running_loop():
            asking = self._asking[key] = asyncio.create_task(self._renewed(key, request))
            asking.add_done_callback(partial(self._ended, key))
        try:
            # a caller that stops waiting leaves the answer to the others
            return await asyncio.shield(asking), False
        except CredentialError as error:
            raise error.again() from None

    def reject(self, token: Token) -> None:
        """Forgets a token that a server did not accept, here and in the shared table, before it expires."""
        if self._tokens.get(token.key) is token:
            del self._tokens[token.key]
            self._rejected[token.key] = token.fields

    def _ended(self, key: tuple[str, int], asking: asyncio.Task[Token]) -> None:
        if self._asking.get(key) is asking:
            del self._asking[key]
        if not asking.cancelled():
            asking.exception()  # otherwise asyncio reports it if nobody waits any more

    async def _renewed(self, key: tuple[str, int], request: TokenRequest) -> Token:
        if self._pool is not None and request.is_shared:
            fields, seconds = await self._shared(self._pool, key, request)
        else:  # each process requests its own
            try:
                fields, seconds = await self._ask(request, self._rotated.get(key))
            except CredentialError as error:
                if error.kind == "auth":
                    self._rotated.pop(key, None)  # the next request begins with the credential's own
                raise
            if request.rotates and fields.get("refresh_token"):
                self._rotated[key] = str(fields["refresh_token"])
        self._rejected.pop(key, None)
        if len(self._tokens) >= MOST_KEPT:
            now = time.monotonic()
            self._tokens = {one: token for one, token in self._tokens.items() if now < token.until}
        token = Token(key, fields, time.monotonic() + seconds, named_secrets(fields))
        SECRETS.hide(*token.secrets)
        self._tokens[key] = token
        return token

    async def _shared(self, pool: asyncpg.Pool, key: tuple[str, int], request: TokenRequest) -> tuple[Fields, float]:
        """Returns the token of the table, or a new one, which one process requests while others wait."""
        name, owner = key
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(_LOCK, name)
            row = await connection.fetchrow(_GET, name, owner)
            if row is not None:
                stored = self._encryption.unseal(request.name, row["data"])
                if stored != self._rejected.get(key):
                    return stored, row["seconds"]
            refresh, rotated = f"{name}:refresh", None
            if request.rotates and (newest := await connection.fetchrow(_GET, refresh, owner)) is not None:
                rotated = self._encryption.unseal(request.name, newest["data"])["refresh_token"]
            try:
                fields, seconds = await self._ask(request, rotated)
            except CredentialError as error:
                if rotated is None or error.kind != "auth":
                    raise
                refused = error
            else:
                await connection.execute(_PUT, name, owner, self._encryption.seal(request.name, fields), seconds)
                if request.rotates and (new := fields.get("refresh_token")):
                    sealed = self._encryption.seal(request.name, {"refresh_token": new})
                    await connection.execute(_PUT, refresh, owner, sealed, REFRESH_LIFE_SECONDS)
                return fields, seconds
            await connection.execute(_FORGET, refresh, owner)  # the next request begins with the credential's own
        raise refused

    async def _ask(self, request: TokenRequest, rotated: str | None) -> tuple[Fields, float]:
        """Requests a new token. Returns the fields of the answer and the seconds for which it may be used."""
        from noetl_dagster.tools.access.web import HttpRequest, WebError, address, answered, bounded_body

        if self._clients is None:
            raise CredentialError(f"{request.what}: no token can be requested here, without HTTP clients")
        if rotated is not None:
            SECRETS.hide(rotated)
        try:
            headers, body = request.compose(rotated)
            sent = HttpRequest(request.method, address(request.url), headers, body)
            async with answered(self._clients.http(), sent, seconds=ASK_SECONDS) as answer:
                content = await bounded_body(answer, self._clients.body_bytes)
        except WebError as error:
            if not error.retryable:
                raise CredentialError(f"{request.place} is refused: {error}", kind="client_error") from None
            kind: ErrorKind = "timeout" if error.late else "connection"
            reason = type(error.__cause__ or error).__name__
            raise CredentialError(f"{request.place} does not answer: {reason}", retryable=True, kind=kind) from None
        except ValueError as error:
            raise CredentialError(f"{request.place} is no address: {type(error).__name__}") from None
        if answer.status >= 300:
            raise _refusal(request, answer.status, content, rotated)
        fields = _fields(request, content)
        return fields, _usable_seconds(request, fields)


def _fields(request: TokenRequest, content: bytes) -> Fields:
    """Returns the fields of an answer. Google's metadata server answers with an id token alone."""
    with suppress(orjson.JSONDecodeError):
        fields = orjson.loads(content)
        if isinstance(fields, dict):
            if not request.wanted or fields.get(request.wanted):
                return fields
            raise CredentialError(f"{request.place} gives no {request.wanted!r}; its answer has {_names(fields)}")
    text = content.decode(errors="replace").strip()
    if request.wanted == "id_token" and _claims(text):
        return {"id_token": text}
    raise CredentialError(f"{request.place} gives no JSON object; a token's fields are needed")


def _names(fields: Fields) -> str:
    return ", ".join(sorted(map(str, fields))) or "no fields"


def _usable_seconds(request: TokenRequest, fields: Fields) -> float:
    """Returns the seconds until a token has to be renewed."""
    default = LIFE_SECONDS if request.life_seconds is None else request.life_seconds
    life = default
    told = _claims(str(fields.get("id_token", ""))).get("exp") if request.wanted == "id_token" else None
    with suppress(TypeError, ValueError):
        life = float(told) - time.time()  # type: ignore[arg-type]
    with suppress(TypeError, ValueError):
        life = float(fields.get("expires_in"))  # type: ignore[arg-type]  # some servers write it as text
    life = min(life, LONGEST_LIFE_SECONDS) if math.isfinite(life) else default
    return max(life - min(life * MARGIN, LONGEST_MARGIN_SECONDS), 0.0)


def _claims(token: str) -> Mapping[str, Any]:
    """Returns the claims of a JWT, which are not verified; none for any other text."""
    parts = token.split(".")
    with suppress(binascii.Error, ValueError):
        if len(parts) == 3 and isinstance(claims := orjson.loads(base64.urlsafe_b64decode(parts[1] + "==")), dict):
            return claims
    return {}


def _refusal(request: TokenRequest, status: int, content: bytes, rotated: str | None) -> CredentialError:
    """Returns the error of a server's refusal, with ``error`` and ``error_description`` of RFC 6749, 5.2."""
    fields = None
    with suppress(orjson.JSONDecodeError):
        fields = orjson.loads(content)
    told = [fields.get(name) for name in ("error", "error_description")] if isinstance(fields, dict) else []
    message = ": ".join(text for text in told if isinstance(text, str))
    for secret in (*request.secrets, *([rotated] if rotated else [])):  # it may repeat the request
        message = message.replace(secret, MASK)
    message = SECRETS.redact(message)[:_MESSAGE]
    if status < 400:
        return CredentialError(f"{request.place} redirects with status {status}; use the server's own address")
    advice = f"; {request.advice}" if request.advice and "invalid_client" in message else ""
    return CredentialError(
        f"{request.place} refuses a token with status {status}{': ' if message else ''}{message}{advice}",
        retryable=status in (408, 425, 429) or status >= 500,
        kind="auth" if status in (400, 401) else kind_of_status(status),
    )


def _shown(url: str) -> str:
    """Returns an address without password, query and fragment."""
    from noetl_dagster.tools.access.web import address, public

    try:
        return public(address(url).with_query(None).with_fragment(None))
    except ValueError:
        return "its address"
