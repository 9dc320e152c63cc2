"""The keychain of a playbook: credentials, secrets by handle, and tokens that every process shares until they expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import CredentialError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access import tokens as tokens_module
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.access.keychain import Keychain
from tests.playbooks import text_of
from tests.tools.access.token_server import PASSWORD, TokenServer, token_server


@pytest.fixture
def server() -> Iterator[TokenServer]:
    with token_server() as made:
        yield made


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"credential_key": SecretStr(Fernet.generate_key().decode())})


@pytest.fixture
async def processes(settings: Settings, pool: asyncpg.Pool[Any]) -> AsyncIterator[list[Keychain]]:
    """Keychains that share nothing but the database."""
    clients = [Clients(settings) for _ in range(6)]
    yield [Keychain(Credentials(settings, pool, one)) for one in clients]
    await asyncio.gather(*(one.close() for one in clients))


def entry(server: TokenServer, **more: Any) -> dict[str, Any]:
    data = {"grant_type": "client_credentials", "client_id": "noetl", "client_secret": PASSWORD}
    return {"name": "api", "kind": "oauth2", "endpoint": f"{server.url}/token", "data": data, **more}


def scope(execution_id: int = 7, **workload: Any) -> Scope:
    return Scope(execution_id=execution_id, workload=workload, ctx={}, steps={})


async def no_fetch(reference: Any) -> Any:
    raise AssertionError("nothing is stored here")


async def opened(keychain: Keychain, *entries: dict[str, Any], within: Scope | None = None) -> Any:
    return await keychain.open(entries, within or scope(), no_fetch)


async def test_processes_that_want_a_token_at_once_ask_for_one(
    processes: list[Keychain], server: TokenServer, pool: asyncpg.Pool[Any]
) -> None:
    server.gate.clear()
    asking = [asyncio.create_task(opened(one, entry(server))) for one in processes]
    await asyncio.to_thread(server.arrived.wait)
    server.gate.set()
    found = await asyncio.gather(*asking)
    assert server.given == ["token-number-0"]
    assert {one["api"]["access_token"] for one in found} == {"token-number-0"}
    assert server.asked == [{"grant_type": "client_credentials", "client_id": "noetl", "client_secret": PASSWORD}]
    [row] = await pool.fetch("SELECT *, expires_at - now() AS life FROM noetl.keychain")
    assert b"token-number-0" not in bytes(row["data"])
    assert row["execution_id"] == 0
    assert timedelta(seconds=3400) < row["life"] < timedelta(seconds=3571), "renewed half a minute before its end"


async def test_a_token_is_renewed_when_it_expires(
    processes: list[Keychain], server: TokenServer, pool: asyncpg.Pool[Any]
) -> None:
    server.life = 0
    assert (await opened(processes[0], entry(server)))["api"]["access_token"] == "token-number-0"
    server.life = "3600"  # some servers say it as text
    assert (await opened(processes[0], entry(server)))["api"]["access_token"] == "token-number-1"
    assert (await opened(processes[1], entry(server)))["api"]["access_token"] == "token-number-1"
    assert await pool.fetchval("SELECT count(*) FROM noetl.keychain") == 1


@pytest.mark.parametrize(("where", "tokens"), [("global", 1), ("catalog", 1), ("local", 2), ("shared", 2)])
async def test_whom_a_token_serves(processes: list[Keychain], server: TokenServer, where: str, tokens: int) -> None:
    for execution_id in (7, 8, 7):
        for one in processes[:2]:
            await opened(one, entry(server, scope=where), within=scope(execution_id))
    assert len(server.given) == tokens


async def test_who_asks_in_other_words_gets_another_token(processes: list[Keychain], server: TokenServer) -> None:
    mine = entry(server, data={"client_id": "{{ workload.user }}", "client_secret": PASSWORD})
    for user in ("ann", "bob", "ann"):
        await opened(processes[0], mine, within=scope(user=user))
    assert [one["client_id"] for one in server.asked] == ["ann", "bob"]


async def test_entries_use_those_before_them(
    settings: Settings, pool: asyncpg.Pool[Any], server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_SECRET", PASSWORD)
    clients = Clients(settings)
    secret = {
        "name": "secrets",
        "kind": "secret_manager",
        "provider": "env",
        "map": {"password": "API_SECRET"},
    }
    allowed = settings.model_copy(update={"playbook_env": ("API_SECRET",)})
    token = entry(server, data={"client_secret": "{{ keychain.secrets.password }}"})
    found = await opened(Keychain(Credentials(allowed, pool, clients)), secret, token)
    assert found == {
        "secrets": {"password": PASSWORD},
        "api": {"access_token": "token-number-0", "expires_in": 3600, "token_type": "Bearer"},
    }
    await clients.close()


async def test_without_a_key_nothing_is_kept_in_the_database(
    settings: Settings, pool: asyncpg.Pool[Any], server: TokenServer
) -> None:
    own = settings.model_copy(update={"credential_key": None})
    clients = Clients(own)
    keychain = Keychain(Credentials(own, pool, clients))
    for _ in range(3):
        await opened(keychain, entry(server))
    assert len(server.given) == 1
    assert await pool.fetchval("SELECT count(*) FROM noetl.keychain") == 0
    await clients.close()


async def test_what_goes_wrong_is_said_without_secrets(processes: list[Keychain], server: TokenServer) -> None:
    with pytest.raises(CredentialError, match=r"'api'.*refuses a token with status 401") as caught:
        await opened(processes[0], entry(server, data={"client_secret": "a wrong secret"}))
    assert "wrong secret" not in str(caught.value)
    with pytest.raises(CredentialError, match="scope 'galaxy'; use one of global, catalog, local, shared"):
        await opened(processes[0], entry(server, scope="galaxy"))


PLAYBOOK = text_of(
    "tokens",
    """
    workload: {api: "http://localhost", secret: ""}
    keychain:
      - name: api
        kind: oauth2
        endpoint: "{{ workload.api }}/token"
        data: {client_secret: "{{ workload.secret }}"}
    workflow:
      - step: first
        tool: {kind: http, url: "{{ api }}/whoami", headers: {Authorization: "Bearer {{ keychain.api.access_token }}"}}
        next: [second]
      - step: second
        tool: {kind: http, url: "{{ api }}/whoami", headers: {Authorization: "Bearer {{ keychain.api.access_token }}"}}
        next: [last]
      - step: last
        tool:
          kind: python
          input: {token: "{{ keychain.api.access_token }}"}
          code: "raise RuntimeError('cannot log in with ' + token)"
    """,
)


async def test_a_token_outlives_its_step_and_stays_out_of_the_log(
    settings: Settings, server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that have expired between two steps are renewed; no event holds one."""
    monkeypatch.setattr(tokens_module, "LIFE_SECONDS", 0.0)
    server.life = None
    engine = await Engine.open(settings)
    loaded = parse_playbook(PLAYBOOK, file="tokens.yaml")
    state = await engine.run(loaded, {"api": server.url, "secret": PASSWORD})
    assert state.latest["second"].envelope["status"] == "ok", state.error
    assert state.status is ExecutionStatus.FAILED
    assert "cannot log in with ***" in str(state.error)
    assert len(server.given) == 3
    texts = await engine.runtime.pool.fetch("SELECT event::text AS text FROM noetl.event")
    assert not [row["text"] for row in texts if "token-number" in row["text"]]

    kept = "SELECT count(*) FROM noetl.keychain"
    assert await engine.runtime.pool.fetchval(kept) == 1
    await engine.maintenance().run(datetime.now(UTC) + timedelta(seconds=1))
    assert await engine.runtime.pool.fetchval(kept) == 0
    await engine.close()
