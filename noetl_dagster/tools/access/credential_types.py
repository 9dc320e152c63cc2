"""The types of credentials, and their shapes in files and variables."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from noetl_dagster.errors import CredentialError
from noetl_dagster.process.redaction import named_secrets
from noetl_dagster.tools.access.tokens import Token


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
    OAUTH2 = "oauth2"
    GOOGLE_ID_TOKEN = "google_id_token"
    GOOGLE_SERVICE_ACCOUNT = "google_service_account"


HTTP_TYPES = (CredentialType.BASIC, CredentialType.BEARER, CredentialType.HEADER, CredentialType.HTTP)

TOKEN_TYPES = frozenset({CredentialType.OAUTH2, CredentialType.GOOGLE_ID_TOKEN, CredentialType.GOOGLE_SERVICE_ACCOUNT})
"""Types whose credentials are exchanged for tokens that expire."""

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
    "oauth": "oauth2",
    "oauth2clientcredentials": "oauth2",
    "clientcredentials": "oauth2",
    "gcpserviceaccount": "google_service_account",
    "googleidtoken": "google_id_token",
    "googleserviceaccount": "google_service_account",
    "serviceaccount": "google_service_account",
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
    """A named set of connection data. Its ``repr`` shows the names of the fields, never their values.

    Attributes:
        tokens: those in ``data`` that were issued earlier, and which a server may not accept any more.
    """

    name: str
    type: CredentialType
    data: Mapping[str, Any] = field(repr=False)
    tokens: tuple[Token, ...] = field(default=(), repr=False, compare=False)

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
        secrets_here = named_secrets(self.data)
        user, password = self.get("username", "user"), self.get("password")
        if user is not None and password is not None:
            secrets_here.append(base64.b64encode(f"{user}:{password}".encode()).decode())
        return secrets_here


def credential_type(text: str) -> CredentialType:
    """Returns the type that a text names, in any of its spellings. Raises ``CredentialError`` if it is unknown."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    try:
        return CredentialType(_ALIASES.get(plain, plain))
    except ValueError:
        types = ", ".join(CredentialType)
        raise CredentialError(f"unknown credential type {text!r}; known types: {types}") from None


def parse_credential(name: str, value: Any, source: str) -> Credential:
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
