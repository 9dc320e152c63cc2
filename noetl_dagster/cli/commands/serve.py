"""``serve``: the HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer
import uvicorn

from noetl_dagster import embedded
from noetl_dagster.cli.console import fail
from noetl_dagster.engine.engine import Engine
from noetl_dagster.launcher.address import Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.service.app import create_app
from noetl_dagster.service.plane import Plane
from noetl_dagster.settings import Settings, settings_with


def serve(
    host: Annotated[str | None, typer.Option(help="address to listen on; NOETL_SERVICE_HOST")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free port; NOETL_SERVICE_PORT")] = None,
) -> None:
    """Serve the HTTP API that workers claim from, and take worker events from NATS, until interrupted."""
    settings = embedded.ensure(settings_with(service_host=host, service_port=port))
    check_exposure(settings)
    environment = embedded.environment(settings)
    if "DAGSTER_HOME" not in os.environ:
        environment["DAGSTER_HOME"] = str(embedded.dagster_home(settings))

    address = Address.of(
        embedded.run_server_folder(settings), {**os.environ, **environment}, settings.driven_at_once
    )

    def launcher_of(engine: Engine) -> WarmLauncher:
        return WarmLauncher(engine, address, environment)

    @asynccontextmanager
    async def plane() -> AsyncIterator[Plane]:
        opened = await Plane.open(settings, launcher_of)
        launcher = opened.launcher
        assert isinstance(launcher, WarmLauncher)
        warming = asyncio.create_task(launcher.connect())  # the first execution finds it warm
        listener.listen(config.backlog)  # who reads the address below may call at once
        typer.echo(f"HTTP API on {scheme}://{settings.service_host}:{listener.getsockname()[1]}")
        try:
            yield opened
        finally:
            await warming
            await opened.close()

    config = uvicorn.Config(
        create_app(settings, plane),
        host=settings.service_host,
        port=settings.service_port,
        ssl_certfile=settings.service_tls_cert,
        ssl_keyfile=settings.service_tls_key,
        log_config=None,  # its lines are ours: see noetl_dagster.logs
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
    )
    listener = config.bind_socket()
    listener.set_inheritable(False)  # runs outlive the service: they must not keep its port
    scheme = "https" if config.is_ssl else "http"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn ends, then raises the signal once more
    uvicorn.Server(config).run(sockets=[listener])


def check_exposure(settings: Settings) -> None:
    """Refuses to listen beyond this machine without tokens, or with tokens in clear text."""
    if is_loopback(settings.service_host):
        return
    if settings.service_tokens is None:
        fail(
            f"the HTTP API would listen on {settings.service_host} without tokens; "
            "set NOETL_SERVICE_TOKENS, or listen on 127.0.0.1",
            code=2,
        )
    if settings.service_tls_cert is None and not settings.service_tls_terminated:
        fail(
            f"the HTTP API would listen on {settings.service_host} without TLS; set NOETL_SERVICE_TLS_CERT and "
            "NOETL_SERVICE_TLS_KEY, or NOETL_SERVICE_TLS_TERMINATED=true where a proxy before it does TLS",
            code=2,
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
