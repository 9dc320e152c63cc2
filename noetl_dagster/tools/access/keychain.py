"""A playbook's ``keychain``: fields of credentials, secrets by handle, and tokens that expire.

An entry becomes ``{{ keychain.<name>.<field> }}`` in tool fields and nowhere else. A token is requested once and
shared by every process until it expires, through ``noetl.keychain``, where it is encrypted as credentials are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import CredentialError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.playbook.templates.rendering import Fetch, compile_value, render_async
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.process.redaction import SECRETS, named_secrets
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import HANDLE_PREFIX, Credentials

OF_ANY_EXECUTION = 0
SCOPES = {"global": True, "catalog": True, "local": False, "shared": False}
"""Whether an entry of the scope is shared between executions."""

ASK_SECONDS = 30.0
LIFE_SECONDS = 3_600.0  # of a token without ``expires_in`` whose entry has no ``ttl_seconds``
MARGIN = 0.1  # a token is renewed when this part of its life is left
LONGEST_MARGIN_SECONDS = 30.0  # or so many seconds

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


class Keychain:
    """Opens the entries of playbooks; one object for each process. ``pool`` leads to ``noetl.keychain``."""

    def __init__(self, credentials: Credentials, clients: Clients, pool: asyncpg.Pool) -> None:
        self._credentials = credentials
        self._encryption = credentials.encryption
        self._clients = clients
        self._pool = pool
        self._tokens: dict[tuple[str, int], tuple[float, Mapping[str, Any], list[str]]] = {}

    async def open(self, entries: Sequence[Mapping[str, Any]], scope: Scope, fetch: Fetch) -> Mapping[str, Any]:
        """Returns the fields of every entry, by its name. An entry may use those before it.

        Raises:
            CredentialError: a credential or secret is not found, or a token was refused.
            TemplateError: an entry cannot be rendered.
        """
        opened: dict[str, Any] = {}
        for entry in entries:
            name = str(entry["name"])
            rendered = await render_async(compile_value(dict(entry)), scope.with_keychain(opened), fetch)
            opened[name] = await self._open(name, rendered, scope.execution_id)
        return opened

    async def _open(self, name: str, entry: Mapping[str, Any], execution_id: int) -> Mapping[str, Any]:
        if entry.get("endpoint") or entry.get("url"):
            return await self._token(name, entry, execution_id)
        if isinstance(entry.get("map"), Mapping):
            prefix, reveal = f"{HANDLE_PREFIX}{entry.get('provider', 'env')}", self._credentials.reveal
            return {field: await reveal(f"{prefix}/{path}") for field, path in entry["map"].items()}
        wanted = str(entry.get("credential") or entry.get("auth") or name)
        return (await self._credentials.get(wanted)).data

    async def _token(self, name: str, entry: Mapping[str, Any], execution_id: int) -> Mapping[str, Any]:
        scope = str(entry.get("scope", "global"))
        if scope not in SCOPES:
            raise CredentialError(f"keychain entry {name!r} has scope {scope!r}; use one of {', '.join(SCOPES)}")
        owner = OF_ANY_EXECUTION if SCOPES[scope] else execution_id
        # entries with the same request share a token's row
        asked = encode_json([entry.get(part) for part in ("endpoint", "url", "method", "headers", "data")])
        key = f"{name}:{self._encryption.digest(asked)}"
        until, token, secrets = self._tokens.get((key, owner), (0.0, {}, []))
        if time.monotonic() < until:
            SECRETS.hide(*secrets)
            return token
        if self._encryption.has_key:
            token, seconds = await self._shared(name, key, owner, entry)
        else:  # it cannot be stored: each process requests its own
            token, seconds = await self._ask(name, entry)
        secrets = named_secrets(token)
        SECRETS.hide(*secrets)
        self._tokens[(key, owner)] = (time.monotonic() + seconds, token, secrets)
        return token

    async def _shared(
        self, name: str, key: str, owner: int, entry: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], float]:
        """Returns the token of the table, or a new one, which one process requests while others wait."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(_LOCK, key)
            row = await connection.fetchrow(_GET, key, owner)
            if row is not None:
                return self._encryption.unseal(name, row["data"]), row["seconds"]
            token, seconds = await self._ask(name, entry)
            await connection.execute(_PUT, key, owner, self._encryption.seal(name, token), seconds)
            return token, seconds

    async def _ask(self, name: str, entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
        """Requests a new token. Returns it and the seconds for which it may be used."""
        from noetl_dagster.tools.access.web import HttpRequest, WebError, address, answered, bounded_body, form_encoded

        endpoint = str(entry.get("endpoint") or entry.get("url"))
        headers = {str(key): str(value) for key, value in (entry.get("headers") or {}).items()}
        kind = next((value for key, value in headers.items() if key.lower() == "content-type"), "")
        data = entry.get("data") or {}
        body = orjson.dumps(data) if "json" in kind else form_encoded(data)
        if not kind:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        what = f"keychain entry {name!r}: {endpoint.partition('?')[0]}"
        try:
            request = HttpRequest(str(entry.get("method", "POST")), address(endpoint), headers, body)
            async with answered(self._clients.http(), request, seconds=ASK_SECONDS) as answer:
                content = await bounded_body(answer, self._clients.body_bytes)
        except WebError as error:
            reason = f"does not answer: {type(error).__name__}" if error.retryable else f"is refused: {error}"
            raise CredentialError(f"{what} {reason}") from None
        except ValueError as error:
            raise CredentialError(f"{what} does not answer: {type(error).__name__}") from None
        if answer.status >= 400:  # its text may repeat the request
            raise CredentialError(f"{what} refuses a token with status {answer.status}")
        token, life = None, LIFE_SECONDS
        with suppress(orjson.JSONDecodeError):
            token = orjson.loads(content)
        if not isinstance(token, dict):
            raise CredentialError(f"{what} gives no JSON object; a token's fields are needed")
        for text in (entry.get("ttl_seconds"), token.get("expires_in")):  # the latter takes precedence
            with suppress(TypeError, ValueError):
                life = float(text)  # type: ignore[arg-type]
        return token, max(life - min(life * MARGIN, LONGEST_MARGIN_SECONDS), 0.0)
