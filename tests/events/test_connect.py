"""Connections to one of several hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from noetl_dagster.embedded import driver_url
from noetl_dagster.errors import ServiceError
from noetl_dagster.events import connection as connections
from noetl_dagster.events.connection import connect, host_addresses, open_pool
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import postgres_arguments
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.sinks.postgres import is_event_log


@pytest.fixture
def silent() -> Iterator[str]:
    """A host that takes connections and never says anything, as a stopped machine behind a proxy does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def beside(settings: Settings, *others: str) -> str:
    """The address of the log, with other hosts before its own."""
    parts = urlsplit(str(settings.db_url))
    login, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{login}@{','.join([*others, host])}").geturl()


async def test_hosts_that_do_not_answer_are_passed_over(
    settings: Settings, silent: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "NEXT_HOST_SECONDS", 0.05)
    pool = await open_pool(beside(settings, silent, f"127.0.0.1:{closed_port}"), size=2)
    assert await pool.fetchval("SELECT current_database()") == urlsplit(str(settings.db_url)).path[1:]
    await pool.close()


async def test_a_wrong_password_is_no_reason_to_wait(settings: Settings, silent: str) -> None:
    parts = urlsplit(beside(settings))
    wrong = parts._replace(netloc=f"noetl_client:wrong@{parts.netloc.rpartition('@')[2]},{silent}").geturl()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await connect(wrong)


@pytest.mark.parametrize(("login", "database"), [("noetl_client:wrong@", ""), ("", "_elsewhere")])
async def test_a_refusal_is_an_error_that_names_the_setting(settings: Settings, login: str, database: str) -> None:
    parts = urlsplit(str(settings.db_url))
    own, _, host = parts.netloc.rpartition("@")
    wrong = parts._replace(netloc=(login or f"{own}@") + host, path=parts.path + database).geturl()
    with pytest.raises(ServiceError, match=r"refuses the connection: .*; check NOETL_DB_URL"):
        await open_pool(wrong)


async def test_the_latest_failure_of_all_hosts(settings: Settings, closed_port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        await connect(f"postgresql://u:p@127.0.0.1:{closed_port},127.0.0.1:{closed_port}/noetl")


async def test_a_machine_that_vanishes_is_noticed(settings: Settings) -> None:
    opened = await connect(str(settings.db_url))
    used = opened._transport.get_extra_info("socket")
    assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    await opened.close()


HOSTS = [
    ("postgresql://u:p@a/db", ["postgresql://u:p@a/db"]),
    ("postgresql://a:1,b:2/db?x=1", ["postgresql://a:1/db?x=1", "postgresql://b:2/db?x=1"]),
    ("postgresql://u:p%40@[::1]:1,b/db", ["postgresql://u:p%40@[::1]:1/db", "postgresql://u:p%40@b/db"]),
    ("postgresql:///db?host=/run/postgresql", ["postgresql:///db?host=/run/postgresql"]),
]


@pytest.mark.parametrize(("url", "expected"), HOSTS)
def test_hosts_of_an_address(url: str, expected: list[str]) -> None:
    assert host_addresses(url) == expected


@pytest.mark.parametrize(
    ("url", "attributes"),
    [
        ("postgresql://u:p@a/db", None),
        ("postgresql+psycopg2://u:p@a,b/db", "read-write"),
        ("postgresql://u:p@a,b/db?target_session_attrs=any", None),
    ],
)
def test_the_host_of_a_credential(url: str, attributes: str | None) -> None:
    found = postgres_arguments(Credential("lake", CredentialType.POSTGRES, {"url": url}))
    assert found.get("target_session_attrs") == attributes


DRIVER = [
    ("postgres://u:p@a/db", "postgresql+psycopg2://u:p@a/db"),
    ("postgresql://u:p@a:1/db?sslmode=require", "postgresql+psycopg2://u:p@a:1/db?sslmode=require"),
    (
        "postgresql://u:p@a:1,b:2/db",
        "postgresql+psycopg2://u:p@/db?host=a%3A1&host=b%3A2&target_session_attrs=read-write&connect_timeout=10",
    ),
    (
        "postgresql://a,b/db?connect_timeout=2&sslmode=require",
        "postgresql+psycopg2:///db?host=a&host=b&target_session_attrs=read-write&connect_timeout=2&sslmode=require",
    ),
]


@pytest.mark.parametrize(("url", "expected"), DRIVER)
def test_the_address_for_dagster(url: str, expected: str) -> None:
    assert driver_url(url) == expected


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("postgresql://a,b:5432/noetl", True),
        ("postgresql://other@B,A/noetl?target_session_attrs=primary", True),
        ("postgresql://a/noetl", False),
        ("postgresql://a,b:5433/noetl", False),
    ],
)
def test_credentials_of_the_log_itself(url: str, same: bool) -> None:
    credential = Credential("lake", CredentialType.POSTGRES, {"url": url})
    assert is_event_log(credential, Settings(db_url="postgresql://u:p@a:5432,b/noetl")) is same
