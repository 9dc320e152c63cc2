"""A playbook's ``keychain``: fields of credentials, secrets by handle, and tokens that expire.

An entry becomes ``{{ keychain.<name>.<field> }}`` in tool fields and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from noetl_dagster.errors import CredentialError
from noetl_dagster.playbook.templates.rendering import Fetch, compile_value, render_async
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.process.redaction import named_secrets
from noetl_dagster.tools.access.credentials import HANDLE_PREFIX, Credentials
from noetl_dagster.tools.access.tokens import OF_ANY_EXECUTION, TokenRequest
from noetl_dagster.values import encode_json

SCOPES = {"global": True, "catalog": True, "local": False, "shared": False}
"""Whether an entry of the scope is shared between executions."""


class Keychain:
    """Opens the entries of playbooks; one object for each process."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

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
        return await self._credentials.fields(str(entry.get("credential") or entry.get("auth") or name))

    async def _token(self, name: str, entry: Mapping[str, Any], execution_id: int) -> Mapping[str, Any]:
        scope = str(entry.get("scope", "global"))
        if scope not in SCOPES:
            raise CredentialError(f"keychain entry {name!r} has scope {scope!r}; use one of {', '.join(SCOPES)}")
        owner = OF_ANY_EXECUTION if SCOPES[scope] else execution_id
        token, _ = await self._credentials.tokens.get(_request(name, entry), owner)
        return token.fields


def _request(name: str, entry: Mapping[str, Any]) -> TokenRequest:
    """Returns the request of an entry, which its playbook words itself."""
    headers = {str(key): str(value) for key, value in (entry.get("headers") or {}).items()}
    kind = next((value for key, value in headers.items() if key.lower() == "content-type"), "")
    data, life = entry.get("data") or {}, None
    with suppress(KeyError, TypeError, ValueError):
        life = float(entry["ttl_seconds"])

    def composed(_: str | None) -> tuple[dict[str, str], bytes]:
        from noetl_dagster.tools.access.web import form_encoded

        if kind:
            return headers, orjson.dumps(data) if "json" in kind else form_encoded(data)
        return {**headers, "Content-Type": "application/x-www-form-urlencoded"}, form_encoded(data)

    return TokenRequest(
        name,
        f"keychain entry {name!r}",
        encode_json([entry.get(part) for part in ("endpoint", "url", "method", "headers", "data")]),
        str(entry.get("endpoint") or entry.get("url")),
        composed,
        method=str(entry.get("method", "POST")),
        secrets=tuple(named_secrets(data)) if isinstance(data, Mapping) else (),
        life_seconds=life,
    )
