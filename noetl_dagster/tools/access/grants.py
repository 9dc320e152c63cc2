"""Requests for tokens, made from the fields of credentials: OAuth 2.0, Google's service accounts and id tokens.

Google's libraries are not used: their requests would not go through the gates for addresses, and would block.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import orjson

from noetl_dagster.errors import CredentialError
from noetl_dagster.playbook.tool_kinds import DOCUMENTARY
from noetl_dagster.process.redaction import named_secrets
from noetl_dagster.tools.access.tokens import TokenRequest
from noetl_dagster.values import encode_json

Spelling = tuple[str, ...]
Form = dict[str, Any]

GOOGLE_TOKEN_URL = "https://oauth2.googleapis.com/token"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
METADATA_HOST = "metadata.google.internal"
JWT_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
JWT_SECONDS = 3_600  # the longest that Google accepts

_CONNECTION = {
    "url": ("url", "base_url"),
    "headers": ("headers",),
}
_USE = {**_CONNECTION, "bucket": ("bucket",)}
"""Fields that say where the token is used."""

BEARER: Mapping[str, Spelling] = {"token": ("token", "access_token", "bearer_token"), **_CONNECTION}
API_KEY: Mapping[str, Spelling] = {
    "value": ("value", "api_key", "key", "token"),
    "header": ("header", "header_name", "name"),
    "param": ("param", "query_param", "param_name", "parameter"),
    "in": ("in", "location"),
    **_CONNECTION,
}
OAUTH2: Mapping[str, Spelling] = {
    "client_id": ("client_id",),
    "client_secret": ("client_secret",),
    "token_url": ("token_url", "token_uri", "token_endpoint", "endpoint", "access_token_url", "auth_url"),
    "scope": ("scope", "scopes"),
    "audience": ("audience",),
    "resource": ("resource",),
    "refresh_token": ("refresh_token",),
    "grant_type": ("grant_type", "grant"),
    "auth_method": ("auth_method", "token_endpoint_auth_method", "client_auth", "auth_style"),
    "params": ("params", "parameters", "extra_params", "extra"),
    **_USE,
}
_KEY_FILE = (
    *("type", "project_id", "private_key_id", "auth_uri", "universe_domain"),
    *("auth_provider_x509_cert_url", "client_x509_cert_url"),
)
_ACCOUNT: Mapping[str, Spelling] = {
    "service_account": ("service_account", "service_account_json", "service_account_key", "keyfile_json", "key"),
    "private_key": ("private_key",),
    "client_email": ("client_email", "email", "service_account_email"),
    "token_uri": ("token_uri", "token_url", "token_endpoint", "endpoint"),
    **{name: (name,) for name in ("client_id", *_KEY_FILE)},
    **_USE,
}
SERVICE_ACCOUNT: Mapping[str, Spelling] = {
    "scope": ("scopes", "scope"),
    "subject": ("subject", "sub", "delegated_user"),
    **_ACCOUNT,
}
ID_TOKEN: Mapping[str, Spelling] = {"audience": ("audience", "target_audience", "aud"), **_ACCOUNT}

_METHODS = {
    "basic": ("basic", "client_secret_basic", "header"),
    "post": ("post", "client_secret_post", "body", "form"),
}


class CredentialFields:
    """The fields of a credential under canonical names, whatever their spelling.

    Args:
        spellings: by canonical name; the first is shown in messages.

    Raises:
        CredentialError: a field is unknown, or two spellings of one have different values.
    """

    def __init__(self, what: str, data: Mapping[str, Any], spellings: Mapping[str, Spelling]) -> None:
        self._what = what
        self._spellings = spellings
        names = {_plain(one): name for name, spelled in spellings.items() for one in spelled}
        self._values: dict[str, Any] = {}
        for field, value in data.items():
            name = names.get(_plain(str(field)))
            if name is None:
                if str(field) in DOCUMENTARY:
                    continue
                shown = tuple(spelled[0] for name, spelled in spellings.items() if name not in _KEY_FILE)
                raise CredentialError(f"{what} has an unknown field {field!r}; known: {', '.join(shown)}")
            if value in (None, ""):
                continue
            if self._values.setdefault(name, value) != value:
                raise CredentialError(f"{what}: {' and '.join(spellings[name])} mean the same; keep one of them")

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field."""
        return self._values.get(name, default)

    def need(self, *names: str) -> tuple[str, ...]:
        """Returns texts; raises ``CredentialError`` with the names of the missing ones."""
        missing = [self._spellings[name][0] for name in names if name not in self._values]
        if missing:
            raise CredentialError(f"{self._what} has no {' and no '.join(map(repr, missing))}; add it")
        return tuple(str(self._values[name]) for name in names)

    def words(self, name: str, default: str = "") -> str:
        """Returns a list, or a text with commas or spaces, as a text with spaces."""
        value = self._values.get(name, default)
        return " ".join(map(str, value if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value)))).strip()

    def identity(self, kind: str) -> bytes:
        """Returns what distinguishes the credential's tokens."""
        return encode_json([kind, sorted(one for one in self._values.items() if one[0] not in _USE)])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def oauth2(name: str, data: Mapping[str, Any]) -> TokenRequest:
    """Returns the request of RFC 6749 for a client's own token (4.4), or with its refresh token (6)."""
    what = f"credential {name!r} of type oauth2"
    fields = CredentialFields(what, data, OAUTH2)
    own = fields.get("refresh_token")
    grant = str(fields.get("grant_type", "client_credentials" if own is None else "refresh_token"))
    if grant not in ("client_credentials", "refresh_token"):
        raise CredentialError(f"{what}: grant_type {grant!r} is unknown; known: client_credentials, refresh_token")
    refreshes = grant == "refresh_token"
    url, client = fields.need("token_url", "client_id", *(["refresh_token"] if refreshes else ["client_secret"]))[:2]
    wanted = str(fields.get("auth_method", "basic"))
    method = next((canonical for canonical, spelled in _METHODS.items() if wanted.lower() in spelled), None)
    if method is None:
        raise CredentialError(f"{what}: auth_method {wanted!r} is unknown; known: {', '.join(_METHODS)}")
    params = fields.get("params", {})
    if not isinstance(params, Mapping):
        raise CredentialError(f"{what}: params has to be a mapping of further fields of the request")
    form: Form = {"grant_type": grant, **params}
    form |= {one: fields.get(one) for one in ("audience", "resource") if fields.get(one) is not None}
    if scope := fields.words("scope"):
        form["scope"] = scope
    secret = fields.get("client_secret")
    headers: dict[str, str] = {}
    if secret is not None and method == "basic":
        pair = f"{quote_plus(client)}:{quote_plus(str(secret))}"  # RFC 6749, 2.3.1
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    else:
        form["client_id"] = client
        if secret is not None:
            form["client_secret"] = secret

    def composed(rotated: str | None) -> tuple[dict[str, str], bytes]:
        return _form(form | {"refresh_token": rotated or own} if refreshes else form, headers)

    other = "post" if method == "basic" else "basic"
    return TokenRequest(
        name,
        what,
        fields.identity("oauth2"),
        url,
        composed,
        secrets=tuple(str(one) for one in (secret, own, *named_secrets(params)) if one),
        wanted="access_token",
        rotates=refreshes,
        advice="" if secret is None else f"check client_id and client_secret, or try auth_method: {other}",
    )


def google_service_account(name: str, data: Mapping[str, Any]) -> TokenRequest:
    """Returns the request for an access token: signed with the account's key, or to the metadata server without one."""
    what = f"credential {name!r} of type google_service_account"
    fields = _account(what, data, SERVICE_ACCOUNT)
    scope = fields.words("scope", GOOGLE_SCOPE)
    if fields.get("private_key") is None:
        return _from_metadata(name, what, fields, "token", {"scopes": scope.replace(" ", ",")})
    claims = {"scope": scope}
    if (subject := fields.get("subject")) is not None:
        claims["sub"] = str(subject)
    return _signed(name, what, fields, claims, "access_token")


def google_id_token(name: str, data: Mapping[str, Any]) -> TokenRequest:
    """Returns the request for an id token for an audience, as :func:`google_service_account`."""
    what = f"credential {name!r} of type google_id_token"
    fields = _account(what, data, ID_TOKEN)
    (audience,) = fields.need("audience")
    if fields.get("private_key") is None:
        return _from_metadata(name, what, fields, "identity", {"audience": audience, "format": "full"})
    return _signed(name, what, fields, {"target_audience": audience}, "id_token")


def _account(what: str, data: Mapping[str, Any], spellings: Mapping[str, Spelling]) -> CredentialFields:
    """Returns the fields with those of the key file, which may be one field, as JSON or a mapping."""
    fields = CredentialFields(what, data, spellings)
    key = fields.get("service_account")
    if key is None:
        return fields
    if isinstance(key, str):
        try:
            key = orjson.loads(key)
        except orjson.JSONDecodeError:
            key = None
    if not isinstance(key, Mapping):
        raise CredentialError(f"{what}: service_account is not the JSON of a key file")
    spelled = set(map(_plain, spellings["service_account"]))
    own = {name: value for name, value in data.items() if _plain(str(name)) not in spelled}
    return CredentialFields(what, {**key, **own}, spellings)


def _signed(name: str, what: str, fields: CredentialFields, claims: Mapping[str, str], wanted: str) -> TokenRequest:
    """Returns the request of RFC 7523 with a JWT of the service account."""
    key, email = fields.need("private_key", "client_email")
    url = str(fields.get("token_uri", GOOGLE_TOKEN_URL))

    def composed(_: str | None) -> tuple[dict[str, str], bytes]:
        now = int(time.time())
        header = {"alg": "RS256", "typ": "JWT"}
        if (identifier := fields.get("private_key_id")) is not None:
            header["kid"] = str(identifier)
        payload = {"iss": email, "aud": url, "iat": now, "exp": now + JWT_SECONDS, **claims}
        unsigned = b".".join(map(_base64, (orjson.dumps(header), orjson.dumps(payload))))
        assertion = b".".join((unsigned, _base64(_signature(what, key, unsigned))))
        return _form({"grant_type": JWT_GRANT, "assertion": assertion.decode()}, {})

    return TokenRequest(name, what, fields.identity(wanted), url, composed, secrets=(key,), wanted=wanted)


def _signature(what: str, key: str, content: bytes) -> bytes:
    """Returns the signature RS256 with a private key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:  # environments often hold its line ends as a backslash and an n
        loaded = load_pem_private_key(key.replace("\\n", "\n").encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # its message may quote the key
        loaded = None
    if not isinstance(loaded, RSAPrivateKey):
        raise CredentialError(f"{what}: private_key is no RSA key in PEM format without a password")
    return loaded.sign(content, PKCS1v15(), SHA256())


def _from_metadata(
    name: str, what: str, fields: CredentialFields, path: str, params: Mapping[str, str]
) -> TokenRequest:
    """Returns the request to the metadata server of Google's machines, which needs no key."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA_HOST
    account = quote(str(fields.get("client_email", "default")), safe="@")
    place = f"http://{host}/computeMetadata/v1/instance/service-accounts/{account}/{path}"
    return TokenRequest(
        name,
        what,
        fields.identity(path) + host.encode(),
        f"{place}?{urlencode(params)}",
        lambda _: ({"Metadata-Flavor": "Google"}, None),
        method="GET",
        wanted="id_token" if path == "identity" else "access_token",
        is_shared=False,  # other processes may run for other accounts
    )


def _form(fields: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[dict[str, str], bytes]:
    from noetl_dagster.tools.access.web import form_encoded

    kind = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    return {**kind, **headers}, form_encoded(fields)


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
