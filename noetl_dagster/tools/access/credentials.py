"""Looks up credentials by name and hides their secret values.

The order is the file of ``NOETL_CREDENTIALS_FILE``, the environment variable
``NOETL_CREDENTIAL_<NAME>``, the table ``noetl.credential``. With
``NOETL_DEFAULT_POSTGRES_CREDENTIAL=embedded`` a postgres credential that is in none of them is that of the
embedded server.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import yaml
from cryptography.fernet import Fernet, InvalidToken

from noetl_dagster.errors import CredentialError
from noetl_dagster.playbook.tool_kinds import SECRET_PROVIDERS, secret_provider
from noetl_dagster.process.environment import PREFIX, is_for_playbooks, setting_variable, setting_variables
from noetl_dagster.process.redaction import SECRETS, named_secrets
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.managers.asking import MANAGERS, SecretManagers

CACHE_SECONDS = 60.0
HANDLE_PREFIX = "secret://"

SELECT_CREDENTIAL = "SELECT type, data FROM noetl.credential WHERE name = $1"
SELECT_NAMES = "SELECT name FROM noetl.credential ORDER BY name"
SELECT_SEALED = "SELECT name, data FROM noetl.credential ORDER BY name"
UPSERT_CREDENTIAL = """
INSERT INTO noetl.credential (name, type, data) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET type = EXCLUDED.type, data = EXCLUDED.data, updated_at = now()
"""


class CredentialType(StrEnum):
    """The kinds of credentials."""

    POSTGRES = "postgres"
    MYSQL = "mysql"
    SNOWFLAKE = "snowflake"
    BIGQUERY = "bigquery"
    HTTP = "http"
    BEARER = "bearer"
    BASIC = "basic"
    HEADER = "header"
    S3 = "s3"
    GCS = "gcs"
    NATS = "nats"
    DUCKDB = "duckdb"
    SECRET = "secret"


HTTP_TYPES = frozenset({CredentialType.HTTP, CredentialType.BEARER, CredentialType.BASIC, CredentialType.HEADER})

_ALIASES = {
    "postgresql": "postgres",
    "pg": "postgres",
    "mariadb": "mysql",
    "httpbearer": "bearer",
    "token": "bearer",
    "httpbasic": "basic",
    "httpheader": "header",
    "apikey": "header",
    "minio": "s3",
    "gs": "gcs",
}
_SCHEMES = {
    "postgres": CredentialType.POSTGRES,
    "postgresql": CredentialType.POSTGRES,
    "mysql": CredentialType.MYSQL,
    "mysql+pymysql": CredentialType.MYSQL,
    "mariadb": CredentialType.MYSQL,
    "http": CredentialType.HTTP,
    "https": CredentialType.HTTP,
    "nats": CredentialType.NATS,
    "tls": CredentialType.NATS,
}


@dataclass(frozen=True, slots=True)
class Credential:
    """A named set of connection data. Its ``repr`` shows the names of the fields, never their values."""

    name: str
    type: CredentialType
    data: Mapping[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        return f"Credential({self.name!r}, {self.type.value}, fields: {', '.join(sorted(self.data))})"

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the first of the named fields that is present and not empty."""
        for name in names:
            if self.data.get(name) not in (None, ""):
                return self.data[name]
        return default

    def secrets(self) -> list[str]:
        """Returns the values that must not appear in any text: all but those of fields that are public."""
        found = named_secrets(self.data)
        user, password = self.get("username", "user"), self.get("password")
        if user is not None and password is not None:
            found.append(base64.b64encode(f"{user}:{password}".encode()).decode())
        return found


def credential_type(text: str) -> CredentialType:
    """Returns the type that a text names, in any of its spellings. Raises ``CredentialError`` if it is unknown."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    try:
        return CredentialType(_ALIASES.get(plain, plain))
    except ValueError:
        known = ", ".join(CredentialType)
        raise CredentialError(f"unknown credential type {text!r}; known types: {known}") from None


def environment_name(name: str) -> str:
    """Returns the environment variable of a credential: ``records-api`` -> ``NOETL_CREDENTIAL_RECORDS_API``."""
    return "NOETL_CREDENTIAL_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


class Encryption:
    """Encrypts mappings with the key of the settings, which is never stored in the database."""

    def __init__(self, settings: Settings) -> None:
        key = settings.credential_key
        self._key = None if key is None else key.get_secret_value()

    @property
    def has_key(self) -> bool:
        """Reports whether a key is set; it may still be malformed."""
        return self._key is not None

    def seal(self, name: str, data: Mapping[str, Any]) -> bytes:
        """Returns a credential's data encrypted. Raises ``CredentialError`` without a valid key."""
        remedy = (
            'make one with python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
        )
        return self._fernet(name, remedy).encrypt(orjson.dumps(dict(data)))

    def unseal(self, name: str, sealed: bytes) -> dict[str, Any]:
        """Returns the decrypted data of :meth:`seal`.

        Raises:
            CredentialError: the data was encrypted with another key, or there is none.
        """
        try:
            fernet = self._fernet(name, "set it to the key with which the credential was stored in the database")
            data: dict[str, Any] = orjson.loads(fernet.decrypt(bytes(sealed)))
        except InvalidToken:
            raise CredentialError(
                f"credential {name!r} in the database was encrypted with another key; "
                "set NOETL_CREDENTIAL_KEY to that key or store the credential again"
            ) from None
        return data

    def digest(self, text: bytes) -> str:
        """Returns a keyed digest that distinguishes texts; without the key guesses cannot be verified."""
        return hmac.new((self._key or "").encode(), text, hashlib.sha256).hexdigest()[:32]

    @property
    def key_problem(self) -> str | None:
        """Returns what is wrong with the key itself, None if nothing is."""
        if self._key is None:
            return "NOETL_CREDENTIAL_KEY is not set"
        try:
            Fernet(self._key)
        except ValueError:
            return "NOETL_CREDENTIAL_KEY is not a Fernet key (32 bytes, URL-safe base64)"
        return None

    def _fernet(self, name: str, remedy: str) -> Fernet:
        if self._key is None or self.key_problem is not None:
            raise CredentialError(f"credential {name!r}: {self.key_problem}; {remedy}")
        return Fernet(self._key)


class Credentials:
    """Looks credentials up, stores them encrypted, and hides their secret values in texts.

    Args:
        settings: names the file, the encryption key and the embedded default.
        pool: pool of the database that holds ``noetl.credential``; None leaves that table out.
    """

    def __init__(self, settings: Settings, pool: asyncpg.Pool | None = None) -> None:
        self._settings = settings
        self._pool = pool
        self.encryption = Encryption(settings)
        self._managers = SecretManagers(settings)
        self._cache: dict[str, tuple[float, Credential, list[str]]] = {}
        SECRETS.hide_settings(settings)

    async def get(self, name: str, *types: CredentialType) -> Credential:
        """Returns the credential of that name, if it is of one of the types; none given: any.

        Raises:
            CredentialError: it is not found (the message names every place), or is of another type.
        """
        cached_at, found, secrets = self._cache.get(name, (0.0, None, []))
        if found is None or time.monotonic() - cached_at >= CACHE_SECONDS:
            found = await self._find(name)
            if found is None:
                if (embedded := self._embedded(name, types)) is not None:
                    return embedded
                raise CredentialError(self._not_found(name))
            secrets = found.secrets()
            self._cache[name] = (time.monotonic(), found, secrets)
        SECRETS.hide(*secrets)
        if types and found.type not in types:
            raise CredentialError(f"credential {name!r} is of type {found.type}; {' or '.join(types)} is needed here")
        return found

    async def resolve(self, auth: Any, *types: CredentialType) -> Credential | None:
        """Returns the credential that a rendered ``auth`` field names, or None if the field is empty.

        Accepted: a name; a handle ``secret://...`` of the secrets tool (as a bearer token for http);
        ``{credential: name}``; ``{type: ..., <fields>}`` written inline; ``{alias: name}`` with one alias,
        or several of which one has a fitting type.

        Raises:
            CredentialError: it names none of a fitting type.
        """
        if auth is None or auth == "":
            return self._embedded("default", types)
        if isinstance(auth, str):
            if auth.startswith(HANDLE_PREFIX):
                return await self._inline({"type": "bearer", "token": auth}, types)
            return await self.get(auth, *types)
        if not isinstance(auth, Mapping):
            raise CredentialError(f"auth must be a credential's name or a mapping, not {type(auth).__name__}")
        name = auth.get("credential") or auth.get("name")
        if isinstance(name, str) and name:
            return await self.get(name, *types)
        if "type" in auth:
            return await self._inline(auth, types)
        if len(auth) == 1:
            return await self.resolve(next(iter(auth.values())), *types)
        for entry in auth.values():
            with suppress(CredentialError):
                found = await self.resolve(entry)
                if found is not None and (not types or found.type in types):
                    return found
        raise CredentialError(
            f"auth names {', '.join(map(str, auth))}, none of which is a credential of type "
            f"{' or '.join(types) or 'any'}"
        )

    async def names(self) -> list[str]:
        """Returns the names of the credentials of the file, the environment and the table, in this order.

        Raises:
            CredentialError: the file cannot be read.
        """
        path = self._settings.credentials_file
        found = [str(name) for name in _read_file(path)] if path is not None else []
        known = {environment_name(name) for name in found} | {environment_name("key")}  # which is a setting
        prefix = environment_name("")
        variables = (name for name in setting_variables() if name.startswith(prefix) and name not in known)
        found += sorted(name.removeprefix(prefix).lower() for name in variables)
        if self._pool is not None:
            with suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
                found += [row["name"] for row in await self._pool.fetch(SELECT_NAMES)]
        return list(dict.fromkeys(found))

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

    async def reveal(self, value: Any) -> Any:
        """Returns the secret of a handle ``secret://<provider>/<name>``; any other value unchanged.

        Providers: ``env`` (an environment variable), ``file`` (a file below ``settings.secrets_path``),
        ``credential`` (``<name>/<field>``), and managers (``<name>#<key>``), which are asked once a minute at most.

        Raises:
            CredentialError: there is no such secret, or it cannot be read.
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
            credential_name, _, field_name = name.partition("/")
            credential = await self.get(credential_name)
            secret = credential.get(field_name) if field_name else credential.get("value", "token", "password")
        elif provider in MANAGERS:
            secret = await self._managers.find(provider, name)
        else:
            known = ", ".join(names[0] for names in SECRET_PROVIDERS)
            raise CredentialError(f"secret provider {asked!r} is unknown; known: {known}")
        if secret in (None, ""):
            raise CredentialError(f"secret {name!r} is not found by provider {provider!r}")
        SECRETS.hide(str(secret))
        return str(secret)

    def _variable(self, name: str) -> str | None:
        """Returns an environment variable that playbooks may read."""
        if is_for_playbooks(name, self._settings):
            return os.environ.get(name)
        if name.startswith(PREFIX):
            raise CredentialError(f"secret {name!r} is a setting of the platform, which playbooks cannot read")
        raise CredentialError(f"secret {name!r} is not for playbooks; to allow it, add it to NOETL_PLAYBOOK_ENV")

    async def _find(self, name: str) -> Credential | None:
        path = self._settings.credentials_file
        if path is not None and name in (entries := _read_file(path)):
            return _parse(name, entries[name], f"file {path}")
        variable = environment_name(name)
        text = setting_variable(variable)
        if text is not None:
            return _parse(name, text, f"environment variable {variable}")
        row = None
        if self._pool is not None:
            with suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
                row = await self._pool.fetchrow(SELECT_CREDENTIAL, name)
        if row is None:
            return None
        return Credential(name, credential_type(row["type"]), self.encryption.unseal(name, row["data"]))

    async def _inline(self, auth: Mapping[str, Any], types: tuple[CredentialType, ...]) -> Credential:
        kind = credential_type(str(auth["type"]))
        if types and kind not in types:
            raise CredentialError(f"auth is of type {kind}; {' or '.join(types)} is needed here")
        given = auth.get("data")
        fields = given if isinstance(given, Mapping) else auth
        revealed = {key: await self.reveal(value) for key, value in fields.items() if key != "type"}
        credential = Credential("inline", kind, revealed)
        SECRETS.hide(*credential.secrets())
        return credential

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


def _parse(name: str, value: Any, source: str) -> Credential:
    """Returns a credential from JSON, a URL, or a mapping ``{type, data}`` (fields beside ``type`` also count)."""
    if isinstance(value, str):
        text = value.strip()
        scheme = text.partition("://")[0].lower()
        if scheme in _SCHEMES:
            return Credential(name, _SCHEMES[scheme], {"url": text})
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise CredentialError(
                f"credential {name!r} in {source} is neither JSON nor a URL (postgresql, mysql, http, https, nats)"
            ) from None
    if not isinstance(value, Mapping) or "type" not in value:
        raise CredentialError(f"credential {name!r} in {source} needs 'type' and 'data'")
    data = value.get("data")
    if data is None:
        data = {key: item for key, item in value.items() if key != "type"}
    elif not isinstance(data, Mapping):
        data = {"value": data}
    return Credential(name, credential_type(str(value["type"])), dict(data))
