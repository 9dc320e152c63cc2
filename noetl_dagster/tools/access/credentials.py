"""Looks up credentials by name and hides their secret values.

The order is the file of ``NOETL_CREDENTIALS_FILE``, the environment variable
``NOETL_CREDENTIAL_<NAME>``, the table ``noetl.credential``. With
``NOETL_DEFAULT_POSTGRES_CREDENTIAL=embedded`` a postgres credential that is in none of them is that of the
embedded server.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import yaml

from noetl_dagster.errors import CredentialError
from noetl_dagster.playbook.tool_kinds import SECRET_PROVIDERS, secret_provider
from noetl_dagster.process.environment import PREFIX, is_for_playbooks, setting_variable, setting_variables
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credential_types import (
    TOKEN_TYPES,
    Credential,
    CredentialType,
    credential_type,
    parse_credential,
)
from noetl_dagster.tools.access.encryption import Encryption
from noetl_dagster.tools.access.grants import google_id_token, google_service_account, oauth2
from noetl_dagster.tools.access.managers.asking import MANAGERS, SecretManagers
from noetl_dagster.tools.access.tokens import HttpClients, Token, TokenCache, TokenRequest

CACHE_SECONDS = 60.0
MISSED_SECONDS = 1.0
"""How long a name without a credential stands for the embedded server before it is looked up again."""

HANDLE_PREFIX = "secret://"
INLINE = "inline"  # the name of credentials that ``auth`` writes out

_GRANTS = {
    CredentialType.OAUTH2: oauth2,
    CredentialType.GOOGLE_ID_TOKEN: google_id_token,
    CredentialType.GOOGLE_SERVICE_ACCOUNT: google_service_account,
}
_TOKEN_FIELDS = frozenset({"", "token", "access_token", "id_token"})
_SCOPE = ("scope", "scopes")
_AUDIENCE = ("audience", "target_audience")
_PER_TOKEN = (_SCOPE, _AUDIENCE, ("subject", "sub"))
_REFERENCE = frozenset({"credential", "name", "key", "type", "source", "provider"})
_STORES = frozenset({"credential", "credentials", "credential_store"})

SELECT_CREDENTIAL = "SELECT type, data FROM noetl.credential WHERE name = $1"
SELECT_NAMES = "SELECT name FROM noetl.credential ORDER BY name"
SELECT_SEALED = "SELECT name, data FROM noetl.credential ORDER BY name"
UPSERT_CREDENTIAL = """
INSERT INTO noetl.credential (name, type, data) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET type = EXCLUDED.type, data = EXCLUDED.data, updated_at = now()
"""


def environment_name(name: str) -> str:
    """Returns the environment variable of a credential: ``records-api`` -> ``NOETL_CREDENTIAL_RECORDS_API``."""
    return "NOETL_CREDENTIAL_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


class Credentials:
    """Looks credentials up, stores them encrypted, and hides their secret values in texts.

    Args:
        settings: names the file, the encryption key and the embedded default.
        pool: pool of the database that holds ``noetl.credential``; None leaves that table out.
        clients: send the requests for tokens; None: no credential can be exchanged for a token.
    """

    def __init__(
        self, settings: Settings, pool: asyncpg.Pool | None = None, clients: HttpClients | None = None
    ) -> None:
        self._settings = settings
        self._pool = pool
        self.encryption = Encryption(settings)
        self.tokens = TokenCache(self.encryption, pool, clients)
        self._managers = SecretManagers(settings)
        self._cache: dict[str, tuple[float, Credential, list[str]]] = {}
        self._missed: dict[str, float] = {}
        SECRETS.hide_settings(settings)

    async def get(self, name: str, *types: CredentialType) -> Credential:
        """Returns the credential of that name as one of the types; none given: as it is.

        Where a bearer token or access to Google's object store is needed, credentials of :data:`TOKEN_TYPES` are
        exchanged for a token.

        Raises:
            CredentialError: it is not found (the message names every place), is of another type, or gives no token.
        """
        return await self._fitting(await self._opened(await self._named(name, types)), types)

    async def resolve(self, auth: Any, *types: CredentialType) -> Credential | None:
        """Returns the credential that a rendered ``auth`` field names, or None if the field is empty.

        Accepted: a name; a handle ``secret://...`` of the secrets tool (as a bearer token for http);
        ``{credential: name}``, where ``scope`` or ``audience`` of a token may be added; ``{type: ..., <fields>}``
        written inline; ``{alias: name}`` with one alias, or several of which one has a fitting type.

        Raises:
            CredentialError: it names none of a fitting type, or gives no token.
        """
        if auth is None or auth == "":
            return self._embedded("default", types)
        if isinstance(auth, str):
            if auth.startswith(HANDLE_PREFIX):
                return await self._inline({"type": "bearer", "token": auth}, types)
            return await self.get(auth, *types)
        if not isinstance(auth, Mapping):
            raise CredentialError(f"auth must be a credential's name or a mapping, not {type(auth).__name__}")
        if (name := _reference(auth)) is not None:
            credential = await self._opened(await self._named(name, types))
            return await self._fitting(_adapted(credential, auth), types)
        if "type" in auth:
            return await self._inline(auth, types)
        if len(auth) == 1:
            return await self.resolve(next(iter(auth.values())), *types)
        for entry in auth.values():
            try:
                candidate = await self.resolve(entry)
            except CredentialError as error:
                if error.retryable:
                    raise
                continue
            if candidate is not None and _fits(candidate.type, types):
                return await self._fitting(candidate, types)
        raise CredentialError(
            f"auth names {', '.join(map(str, auth))}, none of which is a credential of type "
            f"{' or '.join(types) or 'any'}"
        )

    async def know(self, auth: Any) -> None:
        """Hides the secrets of a rendered ``auth``, with the token that other processes use.

        Raises:
            CredentialError: as :meth:`resolve`.
        """
        credential = await self.resolve(auth)
        if credential is not None and credential.type in TOKEN_TYPES:
            request = _request(credential)
            if self.tokens.shares(request):
                await self.tokens.get(request)

    def reject(self, credential: Credential) -> bool:
        """Forgets the tokens of a credential that a server did not accept. Returns whether new ones may help."""
        for token in credential.tokens:
            self.tokens.reject(token)
        return bool(credential.tokens)

    async def fields(self, name: str) -> Mapping[str, Any]:
        """Returns the fields of a credential; those of its token, with ``token`` itself, if it is exchanged for one."""
        credential = await self.get(name)
        if credential.type not in TOKEN_TYPES:
            return credential.data
        text, token, _ = await self._issued(credential)
        return {**token.fields, "token": text}

    async def names(self) -> list[str]:
        """Returns the names of the credentials of the file, the environment and the table, in this order.

        Raises:
            CredentialError: the file cannot be read.
        """
        listed = credential_names(self._settings)
        if self._pool is not None:
            with suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
                listed += [row["name"] for row in await self._pool.fetch(SELECT_NAMES)]
        return list(dict.fromkeys(listed))

    async def sealed(self) -> dict[str, bytes]:
        """Returns the encrypted data of the table's credentials, by name."""
        if self._pool is None:
            return {}
        with suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            return {row["name"]: row["data"] for row in await self._pool.fetch(SELECT_SEALED)}
        return {}

    async def store(self, name: str, type: CredentialType | str, data: Mapping[str, Any]) -> None:
        """Writes a credential to ``noetl.credential``, encrypted, and replaces an older one of that name.

        Raises:
            CredentialError: without a database or without a valid ``NOETL_CREDENTIAL_KEY``.
        """
        if self._pool is None:
            raise CredentialError(f"credential {name!r} cannot be stored: no database is connected")
        kind = credential_type(str(type)).value
        await self._pool.execute(UPSERT_CREDENTIAL, name, kind, self.encryption.seal(name, data))
        self._cache.pop(name, None)
        self._missed.pop(name, None)

    async def reveal(self, value: Any) -> Any:
        """Returns the secret of a handle ``secret://<provider>/<name>``; any other value unchanged.

        Providers: ``env`` (an environment variable), ``file`` (a file below ``settings.secrets_path``),
        ``credential`` (``<name>/<field>``; without a field the token, of types that have one), and managers
        (``<name>#<key>``), which are asked once a minute at most.

        Raises:
            CredentialError: there is no such secret, or it cannot be read.
        """
        return await self._reveal(value, [], ())

    async def _reveal(self, value: Any, used: list[Token], opening: tuple[str, ...]) -> Any:
        """Returns :meth:`reveal` of a field. Adds tokens that were issued earlier to ``used``.

        Args:
            opening: the credentials whose fields are being revealed.
        """
        if not isinstance(value, str) or not value.startswith(HANDLE_PREFIX):
            return value
        asked, _, name = value.removeprefix(HANDLE_PREFIX).partition("/")
        provider = secret_provider(asked)
        if provider == "env":
            secret = self._variable(name)
        elif provider == "file":
            secret = _read_secret_file(self._settings.secrets_path, name)
        elif provider == "credential":
            secret = await self._field(name, used, opening)
        elif provider in MANAGERS:
            secret = await self._managers.find(provider, name)
        else:
            providers = ", ".join(names[0] for names in SECRET_PROVIDERS)
            raise CredentialError(f"secret provider {asked!r} is unknown; known: {providers}")
        if secret in (None, ""):
            raise CredentialError(f"secret {name!r} is not found by provider {provider!r}")
        SECRETS.hide(str(secret))
        return str(secret)

    async def _field(self, name: str, used: list[Token], opening: tuple[str, ...]) -> Any:
        """Returns the secret of ``<credential>/<field>``: without a field the main one, which may be a token."""
        name, _, field_name = name.partition("/")
        if name in opening:
            raise CredentialError(f"credentials refer to each other: {' -> '.join((*opening, name))}")
        credential = await self._opened(await self._named(name, ()), opening)
        used += credential.tokens
        if credential.type in TOKEN_TYPES and field_name in _TOKEN_FIELDS:
            text, token, is_earlier = await self._issued(credential)
            used += [token] if is_earlier else []
            return text
        return credential.get(field_name) if field_name else credential.get("value", "token", "password")

    def _variable(self, name: str) -> str | None:
        """Returns an environment variable that playbooks may read."""
        if is_for_playbooks(name, self._settings):
            return os.environ.get(name)
        if name.startswith(PREFIX):
            raise CredentialError(f"secret {name!r} is a setting of the platform, which playbooks cannot read")
        raise CredentialError(f"secret {name!r} is not for playbooks; to allow it, add it to NOETL_PLAYBOOK_ENV")

    async def _named(self, name: str, types: tuple[CredentialType, ...]) -> Credential:
        """Returns the credential of that name as it is stored."""
        now = time.monotonic()
        cached_at, credential, secrets = self._cache.get(name, (0.0, None, []))
        if credential is None or now - cached_at >= CACHE_SECONDS:
            embedded = self._embedded(name, types)
            if embedded is not None and now - self._missed.get(name, 0.0) < MISSED_SECONDS:
                return embedded
            credential = await self._find(name)
            if credential is None:
                if embedded is not None:
                    self._missed[name] = now
                    return embedded
                raise CredentialError(self._not_found(name))
            secrets = credential.secrets()
            self._cache[name] = (now, credential, secrets)
        SECRETS.hide(*secrets)
        return credential

    async def _opened(self, credential: Credential, opening: tuple[str, ...] = ()) -> Credential:
        """Returns the credential with the secrets of the handles in its fields."""
        if not any(isinstance(value, str) and value.startswith(HANDLE_PREFIX) for value in credential.data.values()):
            return credential
        used: list[Token] = []
        within = (*opening, credential.name)
        data = {key: await self._reveal(value, used, within) for key, value in credential.data.items()}
        opened = Credential(credential.name, credential.type, data, tuple(used))
        SECRETS.hide(*opened.secrets())
        return opened

    async def _fitting(self, credential: Credential, types: tuple[CredentialType, ...]) -> Credential:
        """Returns the credential as one of the types, with a token if it is exchanged for one."""
        if not types or credential.type in types:
            return credential
        kind = credential.type
        if not _fits(kind, types):
            advice = ""
            if kind in TOKEN_TYPES:
                advice = '; write its token into a field of such a credential, as "secret://credential/<name>"'
            raise CredentialError(
                f"credential {credential.name!r} is of type {kind}; {' or '.join(types)} is needed here{advice}"
            )
        text, token, is_earlier = await self._issued(credential)
        target = CredentialType.BEARER if CredentialType.BEARER in types else CredentialType.GCS
        used = (*credential.tokens, token) if is_earlier else credential.tokens
        shared = ("bucket",) if target is CredentialType.GCS else ("url", "base_url", "headers")
        own = {name: value for name, value in credential.data.items() if name in shared}
        return Credential(credential.name, target, {**own, "token": text}, used)

    async def _issued(self, credential: Credential) -> tuple[str, Token, bool]:
        """Returns the token of a credential, with its fields, and whether it was issued before this call."""
        request = _request(credential)
        token, is_earlier = await self.tokens.get(request)
        return str(token.fields[request.wanted]), token, is_earlier

    async def _find(self, name: str) -> Credential | None:
        path = self._settings.credentials_file
        if path is not None and name in (entries := _read_file(path)):
            return parse_credential(name, entries[name], f"file {path}")
        variable = environment_name(name)
        text = setting_variable(variable)
        if text is not None:
            return parse_credential(name, text, f"environment variable {variable}")
        row = None
        if self._pool is not None:
            with suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
                row = await self._pool.fetchrow(SELECT_CREDENTIAL, name)
        if row is None:
            return None
        return Credential(name, credential_type(row["type"]), self.encryption.unseal(name, row["data"]))

    async def _inline(self, auth: Mapping[str, Any], types: tuple[CredentialType, ...]) -> Credential:
        kind = credential_type(str(auth["type"]))
        if not _fits(kind, types):
            raise CredentialError(f"auth is of type {kind}; {' or '.join(types)} is needed here")
        data = auth.get("data")
        fields = data if isinstance(data, Mapping) else {key: auth[key] for key in auth if key != "type"}
        credential = await self._opened(Credential(INLINE, kind, dict(fields)))
        SECRETS.hide(*credential.secrets())
        return await self._fitting(credential, types)

    def _embedded(self, name: str, types: tuple[CredentialType, ...]) -> Credential | None:
        """Returns the credential of the embedded server if it is the default for one of the types."""
        url, is_default = self._settings.db_url, self._settings.default_postgres_credential == "embedded"
        if url is None or not is_default or CredentialType.POSTGRES not in types:
            return None
        return Credential(name, CredentialType.POSTGRES, {"url": url})

    def _not_found(self, name: str) -> str:
        path = self._settings.credentials_file
        places = [
            f"file {path}" if path is not None else "a file (NOETL_CREDENTIALS_FILE is not set)",
            f"environment variable {environment_name(name)}",
            "table noetl.credential" if self._pool is not None else "table noetl.credential (not connected)",
        ]
        return f"credential {name!r} is not found; looked in {', '.join(places)}; add it to one of them"


def credential_names(settings: Settings) -> list[str]:
    """Returns the names of the credentials of the file and the environment; raises as :meth:`Credentials.names`."""
    path = settings.credentials_file
    listed = [str(name) for name in _read_file(path)] if path is not None else []
    in_file = {environment_name(name) for name in listed} | {environment_name("key")}  # which is a setting
    prefix = environment_name("")
    variables = (name for name in setting_variables() if name.startswith(prefix) and name not in in_file)
    return listed + sorted(name.removeprefix(prefix).lower() for name in variables)


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CredentialError(f"credentials file {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError:  # its message would quote the line, and with it a secret
        raise CredentialError(f"credentials file {path} is neither YAML nor JSON") from None
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise CredentialError(f"credentials file {path} must be a mapping of name to {{type, data}}")
    return entries


def _read_secret_file(folder: Path, name: str) -> str | None:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise CredentialError(f"secret file {name!r} is outside {folder}")
    return path.read_text().strip() if path.is_file() else None


def _request(credential: Credential) -> TokenRequest:
    return _GRANTS[credential.type](credential.name, credential.data)


def _reference(auth: Mapping[str, Any]) -> str | None:
    """Returns the name of a credential to which a mapping refers; None if it has the fields of one itself."""
    keys = ["credential", "name"]
    if str(auth.get("source", auth.get("provider"))) in _STORES:
        keys.append("key")
    elif _type_of(auth) is CredentialType.HEADER:
        keys.remove("name")  # of the header
    return next((str(auth[key]) for key in keys if isinstance(auth.get(key), str) and auth[key]), None)


def _type_of(auth: Mapping[str, Any]) -> CredentialType | None:
    """Returns the type that a mapping names, None if it is unknown: that of the credential counts."""
    with suppress(CredentialError):
        return credential_type(str(auth.get("type")))
    return None


def _fits(kind: CredentialType, types: tuple[CredentialType, ...]) -> bool:
    """Reports whether a credential of a type is one of some types, or gives a token for one; no types: any fits."""
    if not types or kind in types:
        return True
    if kind in TOKEN_TYPES and CredentialType.BEARER in types:
        return True
    return kind in TOKEN_TYPES - {CredentialType.GOOGLE_ID_TOKEN} and CredentialType.GCS in types


def _adapted(credential: Credential, auth: Mapping[str, Any]) -> Credential:
    """Returns a credential for the scope or audience that ``auth`` adds to its name, and for the kind of token.

    Other fields, such as the address of the token server, are the credential's own.
    """
    asked = _type_of(auth)
    kind = credential.type if asked is None or asked not in TOKEN_TYPES else asked
    if kind not in TOKEN_TYPES:
        return credential
    is_google = CredentialType.OAUTH2 not in (kind, credential.type) and credential.type in TOKEN_TYPES
    if kind is not credential.type and not is_google:
        raise CredentialError(f"credential {credential.name!r} is of type {credential.type}; auth asks for {kind}")
    own = {name: value for name, value in auth.items() if name not in _REFERENCE}
    if unknown := own.keys() - set(fields := [*_SCOPE, *_AUDIENCE]):
        raise CredentialError(
            f"auth: {', '.join(map(repr, sorted(map(str, unknown))))} has no effect beside the name of a credential; "
            f"known: {', '.join(fields)}"
        )
    is_other = kind is not credential.type
    replaced = {name for words in _PER_TOKEN for name in words if is_other or not own.keys().isdisjoint(words)}
    unchanged = {name: value for name, value in credential.data.items() if name not in replaced}
    return Credential(credential.name, kind, {**unchanged, **own}, credential.tokens)
