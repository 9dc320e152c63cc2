"""A NATS server that cannot be reached is said to be so."""

from __future__ import annotations

import socket

import pytest

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.setting_types import separate_addresses, without_login
from noetl_dagster.settings import Settings


async def test_no_server(settings: Settings) -> None:
    with socket.socket() as taken:  # bound, and never listening
        taken.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceError, match="cannot be reached: ConnectionRefusedError"):
            await connect(settings.model_copy(update={"nats_url": url}), "test", seconds=1)


async def test_no_password_is_said(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{taken.getsockname()[1]}"
        own = settings.model_copy(update={"nats_url": f"nats://noetl:hush@{server}"})
        with pytest.raises(ServiceError, match=f"nats://{server} cannot be reached") as caught:
            await connect(own, "test", seconds=1)
    assert "hush" not in str(caught.value)


def test_addresses_of_a_cluster() -> None:
    urls = separate_addresses("nats://u:hush@a:4222,nats://token@b:4222, tls://c:4222,")
    assert [*map(without_login, urls)] == ["nats://a:4222", "nats://b:4222", "tls://c:4222"]


@pytest.mark.parametrize("password", ["p/w", "a,b", "a@b", "a//b"])
def test_badly_escaped_passwords(password: str) -> None:
    urls = separate_addresses(f"nats://u:{password}@a:4222,nats://b:4222")
    assert [*map(without_login, urls)] == ["nats://a:4222", "nats://b:4222"]
