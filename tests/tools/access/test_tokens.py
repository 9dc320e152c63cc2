"""Credentials that are exchanged for tokens, with a token server that checks its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import obstore
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import Clients, open_bucket
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.access.credentials import Credentials, environment_name
from noetl_dagster.tools.access.keychain import Keychain
from tests.tools.access.test_keychain import opened
from tests.tools.access.token_server import (
    ACCOUNT,
    PASSWORD,
    REFRESH_TOKEN,
    TokenServer,
    private_pem,
    token_server,
)

BEARER = CredentialType.BEARER


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    with token_server() as made:
        yield made


@pytest.fixture
def own(settings: Settings) -> Settings:
    return settings.model_copy(update={"credential_key": SecretStr(Fernet.generate_key().decode())})


@pytest.fixture
async def processes(own: Settings, pool: asyncpg.Pool[Any]) -> AsyncIterator[list[Credentials]]:
    """Credentials of processes that share nothing but the database."""
    clients = [Clients(own) for _ in range(3)]
    yield [Credentials(own, pool, one) for one in clients]
    await asyncio.gather(*(one.close() for one in clients))


def client(server: TokenServer, **more: Any) -> dict[str, Any]:
    url = f"{server.url}/token"
    return {"type": "oauth2", "client_id": "noetl", "client_secret": PASSWORD, "token_url": url, **more}


def account(server: TokenServer, type: str = "google_service_account", **more: Any) -> dict[str, Any]:
    key = {"client_email": ACCOUNT, "private_key": private_pem(), "token_uri": f"{server.url}/token"}
    return {"type": type, **key, **more}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Any:
    def store(name: str, fields: dict[str, Any]) -> None:
        fields = dict(fields)
        text = json.dumps({"type": fields.pop("type"), "data": fields})
        monkeypatch.setenv(environment_name(name), text)

    return store


async def token_of(credentials: Credentials, auth: Any) -> str:
    found = await credentials.resolve(auth, BEARER)
    assert found is not None
    return str(found.data["token"])


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, {}),
        ({"type": "oauth", "scopes": ["read", "write"]}, {"scope": "read write"}),
        ({"scope": "read,write", "audience": "api"}, {"scope": "read write", "audience": "api"}),
        ({"auth_method": "client_secret_post"}, {"client_id": "noetl", "client_secret": PASSWORD}),
        ({"params": {"tenant": "t1"}, "note": "of the team"}, {"tenant": "t1"}),
    ],
)
async def test_a_client_gets_a_token(run: Any, tokens: TokenServer, changes: Any, form: Any) -> None:
    tokens.accepts = {"post"} if "auth_method" in changes else {"basic"}
    for _ in range(2):
        answer = await run("http", url=f"{tokens.url}/whoami", auth=client(tokens, **changes))
        assert answer.data["data"]["known"]
    assert tokens.asked == [{"grant_type": "client_credentials", **form}]
    assert SECRETS.redact(f"a {tokens.given[0]} b") == "a *** b"


async def test_words_in_the_wild_mean_the_same(processes: list[Credentials], tokens: TokenServer, stored: Any) -> None:
    url = f"{tokens.url}/token"
    stored("api", {"type": "oauth2_client_credentials", "clientId": "noetl", "clientSecret": PASSWORD, "endpoint": url})
    for auth in (
        "api",
        {"credential": "api"},
        {"type": "bearer", "credential": "api"},
        {"source": "credential", "type": "oauth2", "key": "api"},
        {"web": {"type": "oauth2", "credential": "api"}},
        {"type": "a type of another engine", "credential": "api"},
        {"pg": {"type": "postgres", "url": "postgresql://u@h/d"}, "web": "api"},
        "secret://credential/api",
    ):
        assert await token_of(processes[0], auth) == "token-number-0"
    assert (await processes[0].reveal("secret://credential/api/clientId")) == "noetl"
    assert await token_of(processes[0], {"credential": "api", "scope": "write"}) == "token-number-1"
    assert tokens.asked[1]["scope"] == "write"


async def test_callers_at_once_share_one_request(own: Settings, tokens: TokenServer) -> None:
    clients = Clients(own)
    credentials = Credentials(own, None, clients)
    tokens.gate.clear()
    asking = [asyncio.create_task(token_of(credentials, client(tokens))) for _ in range(20)]
    await asyncio.to_thread(tokens.arrived.wait)  # all of them have asked by now: nothing before the request waits
    asking[0].cancel()
    tokens.gate.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert set(found[1:]) == {"token-number-0"}
    assert len(tokens.asked) == 1

    tokens.status, tokens.life = 503, 0
    errors = await asyncio.gather(
        *(token_of(credentials, client(tokens, scope="x")) for _ in range(3)), return_exceptions=True
    )
    assert {str(one) for one in errors} == {str(errors[0])}
    assert "refuses a token with status 503" in str(errors[0])
    assert len(tokens.asked) == 2
    tokens.status = 200  # a failure is not remembered, and a token without life serves once
    assert [await token_of(credentials, client(tokens, scope="x")) for _ in range(2)] == [
        "token-number-1",
        "token-number-2",
    ]
    await clients.close()


async def test_a_token_that_is_not_accepted_is_renewed_once(run: Any, tokens: TokenServer) -> None:
    async def visit() -> Any:
        return await run("http", url=f"{tokens.url}/whoami", method="POST", json={"a": 1}, auth=client(tokens))

    tokens.revoked = {"all"}
    with pytest.raises(ToolError) as fresh:  # which was issued for this request
        await visit()
    assert fresh.value.kind == "auth"
    assert tokens.visits == ["token-number-0"]

    tokens.revoked = {"token-number-0"}
    assert (await visit()).data["data"]["known"]
    assert tokens.visits[1:] == ["token-number-0", "token-number-1"]

    tokens.revoked = {"all"}
    with pytest.raises(ToolError, match="answered 401"):
        await visit()
    assert tokens.visits[3:] == ["token-number-1", "token-number-2"]


async def test_a_token_in_a_field_is_renewed_too(run: Any, tokens: TokenServer, stored: Any) -> None:
    stored("api", client(tokens))
    auth = {"type": "header", "header": "Authorization", "value": "secret://credential/api"}
    tokens.next = "Bearer-less"
    for _ in range(2):
        assert (await run("http", url=f"{tokens.url}/whoami", auth=auth)).data["data"]["known"]
    tokens.revoked, tokens.next = {"Bearer-less"}, None
    assert (await run("http", url=f"{tokens.url}/whoami", auth=auth)).data["data"]["known"]
    assert tokens.given == ["Bearer-less", "token-number-1"]


async def test_processes_replace_a_token_that_is_not_accepted_once(
    processes: list[Credentials], tokens: TokenServer
) -> None:
    for one in processes:
        await token_of(one, client(tokens))
    assert len(tokens.given) == 1
    found = [await one.resolve(client(tokens), BEARER) for one in processes for _ in range(2)]
    for one, credential in zip([one for one in processes for _ in range(2)], found, strict=True):
        assert credential is not None
        assert one.reject(credential)
        assert await token_of(one, client(tokens)) == "token-number-1"


async def test_a_process_knows_the_tokens_of_others(processes: list[Credentials], tokens: TokenServer) -> None:
    token = await token_of(processes[0], client(tokens))
    SECRETS.forget()  # as in a process that has not read it
    await processes[1].know(client(tokens))
    assert SECRETS.redact(token) == "***"
    assert len(tokens.asked) == 1


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_refresh_token_may_be_replaced(
    settings: Settings, own: Settings, pool: asyncpg.Pool[Any], tokens: TokenServer, has_key: bool
) -> None:
    used = own if has_key else settings.model_copy(update={"credential_key": None})
    clients = Clients(used)
    first, second = (Credentials(used, pool, clients) for _ in range(2))
    auth = client(tokens, refresh_token=REFRESH_TOKEN)
    tokens.rotates, tokens.life = True, 0
    assert [await token_of(first, auth) for _ in range(2)] == ["token-number-0", "token-number-1"]
    assert [one["refresh_token"] for one in tokens.asked] == [REFRESH_TOKEN, "refresh-token-number-1"]
    assert SECRETS.redact("refresh-token-number-2") == "***"

    if has_key:  # other processes, and later ones
        assert await token_of(second, auth) == "token-number-2"
    tokens.refresh_token = REFRESH_TOKEN  # the server forgets; the credential's own counts again
    with pytest.raises(CredentialError, match="invalid_grant: \\*\\*\\* is used up") as caught:
        await token_of(first, auth)
    assert caught.value.kind == "auth"
    assert (await token_of(first, auth)).startswith("token-number-")
    await clients.close()


@pytest.mark.parametrize("shape", ["fields", "text", "mapping", "escaped"])
async def test_a_service_account_gets_access_tokens(
    processes: list[Credentials], tokens: TokenServer, shape: str
) -> None:
    auth = account(tokens, scopes=["https://scope/a", "https://scope/b"], subject="ann@example.org")
    if shape == "escaped":
        auth["private_key"] = auth["private_key"].replace("\n", "\\n")
    elif shape != "fields":
        key = {name: auth.pop(name) for name in ("client_email", "private_key", "token_uri")}
        key |= {"type": "service_account", "project_id": "p", "private_key_id": "k", "auth_uri": "https://a"}
        auth["service_account_json"] = json.dumps(key) if shape == "text" else key
    for _ in range(2):
        assert await token_of(processes[0], auth) == "token-number-0"


async def test_an_id_token_is_for_an_audience(
    run: Any, tokens: TokenServer, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("sa", account(tokens, scopes="https://scope/a"))
    monkeypatch.setenv("GCE_METADATA_HOST", tokens.url.removeprefix("http://"))
    for auth in (
        account(tokens, "google_id_token", audience="https://run"),
        {"type": "google_id_token", "credential": "sa", "audience": "https://run"},
        {"type": "google_id_token", "audience": "https://run"},  # of the machine's own account
    ):
        for _ in range(2):
            answer = await run("http", url=f"{tokens.url}/whoami", auth=auth)
            assert answer.data["data"] == {"known": True, "audience": "https://run"}
    assert len(tokens.given) == 3
    await run("http", url=f"{tokens.url}/whoami", auth={"type": "google_service_account", "scopes": "a b"})
    assert [one for one in tokens.asked if "scopes" in one] == [{"scopes": "a,b"}]
    tokens.life = -10  # an id token that has expired serves once
    for number in (5, 6):
        await run("http", url=f"{tokens.url}/whoami", auth={"type": "google_id_token", "audience": "https://b"})
        assert len(tokens.given) == number


async def test_processes_do_not_share_tokens_of_their_machines(
    processes: list[Credentials], tokens: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", tokens.url.removeprefix("http://"))
    found = [await token_of(one, {"type": "google_service_account"}) for one in processes for _ in range(2)]
    assert found == [f"token-number-{process}" for process in range(3) for _ in range(2)]


@pytest.mark.parametrize(
    ("auth", "fields"),
    [
        ({"type": "api_key", "value": "k3y"}, {"header": ("x-api-key", "k3y")}),
        ({"type": "apiKey", "in": "header", "name": "X-Key", "api_key": "k3y"}, {"header": ("x-key", "k3y")}),
        ({"type": "api_key", "header_name": "X-Key", "key": "k3y"}, {"header": ("x-key", "k3y")}),
        ({"type": "api_key", "in": "query", "name": "key", "value": "k3y"}, {"query": ("key", "k3y")}),
        ({"type": "api_key", "param": "key", "value": "k3y"}, {"query": ("key", "k3y")}),
        ({"type": "bearer", "access_token": "k3y"}, {"header": ("authorization", "Bearer k3y")}),
        ({"type": "basic", "username": "u", "password": "p"}, {"header": ("authorization", "Basic dTpw")}),
        ({"type": "header", "header": "X-Key", "value": "k3y"}, {"header": ("x-key", "k3y")}),
    ],
)
async def test_keys_in_headers_and_parameters(run: Any, server: str, auth: Any, fields: Any) -> None:
    seen = (await run("http", url=f"{server}/x", auth=auth)).data["data"]
    for place, (name, value) in fields.items():
        assert seen["headers" if place == "header" else "query"][name] == value


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": (
        {"type": "oauth2", "client": "x"},
        "credential",
        "unknown field 'client'; known: client_id, client_secr",
    ),
    "missing": ({"type": "oauth2", "client_id": "x"}, "credential", "has no 'token_url' and no 'client_secret'; add"),
    "grant": (
        {"grant_type": "password"},
        "credential",
        "'password' is unknown; known: client_credentials, refresh_tok",
    ),
    "method": ({"auth_method": "magic"}, "credential", "auth_method 'magic' is unknown; known: basic, post"),
    "params": ({"params": "a=b"}, "credential", "params has to be a mapping"),
    "twice": ({"scope": "a", "scopes": "b"}, "credential", "scope and scopes mean the same"),
    "secret": (
        {"client_secret": "wr0ng-secret"},
        "auth",
        "/token refuses a token with status 401: invalid_client: '***' is",
    ),
    "refresh": (
        {"refresh_token": "0ld-token"},
        "auth",
        "/token refuses a token with status 400: invalid_grant: *** is",
    ),
    "away": (
        {"token_url": "http://127.0.0.1:9/token?key=hush-hush"},
        "connection",
        "http://127.0.0.1:9/token does not an",
    ),
    "text": ({"token_url": "{url}/text"}, "credential", "/text gives no JSON object"),
    "empty": ({"token_url": "{url}/empty"}, "credential", "gives no 'access_token'; its answer has id"),
    "moved": ({"token_url": "{url}/moved"}, "credential", "redirects with status 307"),
    "address": ({"token_url": "ftp://h/token"}, "client_error", "is refused: the address is not one of http or https"),
    "audience": ({"type": "google_id_token"}, "credential", "has no 'audience'; add it"),
    "email": ({"type": "google_service_account", "private_key": "x"}, "credential", "has no 'client_email'"),
    "key": (
        {"type": "google_service_account", "private_key": "not-a-k3y", "client_email": ACCOUNT},
        "credential",
        "private_key is no RSA key in PEM format",
    ),
    "json": ({"type": "google_service_account", "key": "not-a-k3y"}, "credential", "is not the JSON of a key file"),
    "api key": ({"type": "api_key", "header": "X"}, "credential", "of type header has no 'value'; add it"),
    "api key in": ({"type": "api_key", "in": "body", "value": "v"}, "credential", "in is header or query, not 'body'"),
    "api key query": ({"type": "api_key", "in": "query", "value": "v"}, "credential", "has no 'param'; add it"),
    "api key field": ({"type": "api_key", "headr": "X", "value": "v"}, "credential", "unknown field 'headr'; known: v"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_mistakes_name_the_credential_and_no_secret(run: Any, tokens: TokenServer, mistake: str) -> None:
    changes, kind, message = MISTAKES[mistake]
    changes = {
        name: value.replace("{url}", tokens.url) if isinstance(value, str) else value for name, value in changes.items()
    }
    with pytest.raises(ToolError) as caught:
        await run("http", url=f"{tokens.url}/whoami", auth=changes if "type" in changes else client(tokens, **changes))
    shown = error_envelope(caught.value)["error"]
    assert message in shown["message"]
    assert "credential 'inline'" in shown["message"]
    assert (shown["kind"], shown["retryable"]) == (kind, kind == "connection")
    for secret in ("wr0ng-secret", "0ld-token", "hush-hush", "not-a-k3y", PASSWORD):
        assert secret not in str(caught.value)


async def test_references_that_do_not_fit_are_refused(
    processes: list[Credentials], tokens: TokenServer, stored: Any
) -> None:
    stored("api", client(tokens))
    stored("id", account(tokens, "google_id_token", audience="a"))
    stored("a", {"type": "bearer", "token": "secret://credential/b"})
    stored("b", {"type": "bearer", "token": "secret://credential/a"})
    for auth, type, message in (
        ("api", CredentialType.POSTGRES, 'write its token into a field of such a credential, as "secret://credential/'),
        ("id", CredentialType.GCS, "of type google_id_token; gcs is needed"),
        ({"type": "google_id_token", "credential": "api"}, BEARER, "of type oauth2; auth asks for google_id_token"),
        ({"credential": "api", "token_url": "http://h"}, BEARER, "'token_url' has no effect beside the name of a cred"),
        ("a", BEARER, "credentials refer to each other: a -> b -> a"),
    ):
        with pytest.raises(CredentialError, match=message):
            await processes[0].resolve(auth, type)
    assert tokens.asked == []


async def test_token_servers_are_reached_as_other_addresses_are(own: Settings, tokens: TokenServer) -> None:
    clients = Clients(own.model_copy(update={"http_deny": ("127.0.0.0/8",)}))
    with pytest.raises(CredentialError, match="is refused: its address is refused by NOETL_HTTP_DENY"):
        await token_of(Credentials(own, None, clients), client(tokens))
    assert tokens.asked == []
    await clients.close()


async def test_a_token_is_the_password_of_other_servers(
    run: Any, settings: Settings, tokens: TokenServer, stored: Any
) -> None:
    stored("api", client(tokens))
    server = urlsplit(settings.db_url or "")
    tokens.next = unquote(server.password or "")
    place = {"host": server.hostname, "port": server.port, "user": server.username, "database": server.path[1:]}
    stored("pg", {"type": "postgres", **place, "password": "secret://credential/api"})
    assert (await run("postgres", auth="pg", command="SELECT 1 AS one")).data["rows"] == [{"one": 1}]

    stored("other", client(tokens, scope="nats"))
    server = urlsplit(settings.nats_url or "")
    tokens.next = unquote(server.password or "")
    auth = {"type": "nats", "url": f"nats://{server.hostname}:{server.port}", "user": unquote(server.username or "")}
    auth["password"] = "secret://credential/other"
    assert (await run("nats", auth=auth, operation="publish", subject="x", value="y")).data["bytes"] == 1
    assert len(tokens.given) == 2


@pytest.mark.parametrize("type", ["oauth2", "google_service_account"])
async def test_a_token_opens_buckets_of_google(
    processes: list[Credentials], own: Settings, tokens: TokenServer, monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", tokens.url)
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    auth = client(tokens) if type == "oauth2" else account(tokens)
    credential = await processes[0].resolve(auth | {"bucket": "bucket"}, CredentialType.GCS)
    answer = await obstore.get_async(open_bucket(own, "gcs", "", credential), "object")
    assert bytes(await answer.bytes_async()) == b"content"


async def test_keychain_entries_hold_the_tokens_of_credentials(
    processes: list[Credentials], tokens: TokenServer, stored: Any
) -> None:
    stored("api", client(tokens))
    found = await opened(Keychain(processes[0]), {"name": "api", "kind": "oauth2", "credential": "api"})
    assert found["api"]["token"] == found["api"]["access_token"] == "token-number-0"
    assert "client_secret" not in found["api"]
