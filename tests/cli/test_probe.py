"""The image's health check: whom it asks about which process, and what it says."""

from __future__ import annotations

import asyncio

import pytest

from noetl_dagster.cli.health import healthy
from noetl_dagster.cli.probe import address_of, complaint_of
from noetl_dagster.settings import Settings


@pytest.mark.parametrize(
    ("line", "environment", "address"),
    [
        ("/usr/bin/tini -- noetl-dagster serve", {}, "http://127.0.0.1:8700/health"),
        ("noetl-dagster serve", {"NOETL_SERVICE_PORT": "80"}, "http://127.0.0.1:80/health"),
        ("noetl-dagster serve", {"NOETL_SERVICE_TLS_CERT": "/tls.pem"}, "https://127.0.0.1:8700/health"),
        ("noetl-dagster serve", {"NOETL_SERVICE_HOST": "0.0.0.0"}, "http://127.0.0.1:8700/health"),
        ("noetl-dagster serve", {"NOETL_SERVICE_HOST": "::"}, "http://[::1]:8700/health"),
        ("noetl-dagster serve", {"NOETL_SERVICE_HOST": "10.1.2.3"}, "http://10.1.2.3:8700/health"),
        ("noetl-dagster serve --host=10.1.2.3 --port 80", {}, "http://10.1.2.3:80/health"),
        ("noetl-dagster serve", {"NOETL_HEALTH_PORT": "8701"}, "http://127.0.0.1:8700/health"),
        ("noetl-dagster serve --port 0", {}, None),
        ("noetl-dagster worker", {}, None),
        ("noetl-dagster worker", {"NOETL_HEALTH_PORT": "8701"}, "http://127.0.0.1:8701/health"),
        (
            "noetl-dagster ingest",
            {
                "NOETL_HEALTH_PORT": "8701",
                "NOETL_HEALTH_HOST": "0.0.0.0",
                "NOETL_SERVICE_TLS_CERT": "/tls.pem",
            },
            "http://127.0.0.1:8701/health",
        ),
        ("python -m noetl_dagster reap", {"NOETL_HEALTH_PORT": "8701"}, "http://127.0.0.1:8701/health"),
        ("noetl-dagster run serve", {}, None),
        ("dagster-webserver -h 0.0.0.0", {"NOETL_HEALTH_PORT": "8701"}, None),
        ("dagster api grpc -m noetl_dagster.definitions", {}, None),
    ],
)
def test_whom_it_asks(line: str, environment: dict[str, str], address: str | None) -> None:
    assert address_of(line.split(), environment) == address
    assert address_of(["sh", "-c", line], environment) == address


async def test_what_it_says_of_answers(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    async with healthy(settings.model_copy(update={"health_port": 0})) as health:
        address = f"{capsys.readouterr().out.split()[-1]}/health"
        assert await asyncio.to_thread(complaint_of, address) is None
        health.trouble = lambda: "a task has ended"
        said = await asyncio.to_thread(complaint_of, address)
        assert said == f"{address} answers 503: a task has ended"
    said = await asyncio.to_thread(complaint_of, address)
    assert str(said).startswith(f"{address} does not answer: ")
