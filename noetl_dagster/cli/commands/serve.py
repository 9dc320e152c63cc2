"""``serve``: the HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from noetl_dagster import embedded
from noetl_dagster.cli.app import set_up_process
from noetl_dagster.cli.console import announce_start, fail, warn_of_stores
from noetl_dagster.service.tokens import parse_tokens
from noetl_dagster.settings import METRICS_FOLDER, Settings, settings_with

if TYPE_CHECKING:
    from fastapi import FastAPI


GRACE_SECONDS = 10
"""Pending requests may take this long after SIGTERM."""

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. It is longer than clients and load balancers keep theirs (mostly 15 to 60 s),
so that no request arrives at a connection that the API is closing."""

BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's own number."""

PING_SECONDS = 30
"""A process that does not answer its parent for this long, on a busy machine too, is replaced."""


def serve(
    host: Annotated[str | None, typer.Option(help="address to listen on; NOETL_SERVICE_HOST")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free port; NOETL_SERVICE_PORT")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="processes behind the address; NOETL_SERVICE_PROCESSES")
    ] = None,
) -> None:
    """Serve the HTTP API, and move worker events from NATS into the event log."""
    options = settings_with(service_host=host, service_port=port, service_processes=processes)
    settings = embedded.ensure(options, announce=announce_start)
    check_exposure(settings)
    asyncio.run(warn_of_stores(settings))
    listener = _bound(settings.service_host, settings.service_port)
    scheme = "https" if settings.service_tls_cert is not None else "http"
    config = ServerConfig(settings, f"{scheme}://{settings.service_host}:{listener.getsockname()[1]}")
    if settings.service_processes > 1:
        sys.exit(_serve_with_several(config, listener))
    _end_normally()
    uvicorn.Server(config).run(sockets=[listener])


class ServerConfig(uvicorn.Config):
    """How uvicorn serves the API: in this process, or in processes that uvicorn starts, which receive a copy.

    Attributes:
        address: of the API, which is printed when it accepts requests.
    """

    def __init__(self, settings: Settings, address: str) -> None:
        self.settings = settings
        self.address = address
        self._creator = os.getpid()
        super().__init__(
            "noetl_dagster.cli.api",
            workers=settings.service_processes,
            ssl_certfile=settings.service_tls_cert,
            ssl_keyfile=settings.service_tls_key,
            log_config=None,  # noetl_dagster.process.logs formats its lines
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_worker_healthcheck=PING_SECONDS,
            ws="none",
            proxy_headers=bool(settings.service_proxies),
            forwarded_allow_ips=",".join(settings.service_proxies),
        )

    def configure_logging(self) -> None:
        """Sets a process up, first of all one that uvicorn has started: it logs as its parent, and ends with it."""
        super().configure_logging()
        if os.getpid() != self._creator:
            set_up_process(self.settings)
            _end_normally()
            threading.Thread(target=_end_with_parent, name="noetl-parent", daemon=True).start()

    def load_app(self) -> FastAPI:
        """Imports the API, which a parent of several processes does not need."""
        from noetl_dagster.cli.api import create_api
        from noetl_dagster.service.connections import bounded_connections

        self.http_protocol_class = bounded_connections(self.settings)
        return create_api(self.settings, self.announce)

    def announce(self) -> None:
        """Prints the address once, not for each process."""
        if os.getpid() == self._creator:
            typer.echo(f"HTTP API on {self.address}")


def _end_normally() -> None:
    """Lets this process end as others do after SIGTERM: uvicorn ends, then raises the signal again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_with_several(config: ServerConfig, listener: socket.socket) -> int:
    """Serves with several processes on the socket; returns the exit code."""
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)  # of processes that end and start
    with ExitStack() as stack:
        if not os.environ.get(METRICS_FOLDER):
            os.environ[METRICS_FOLDER] = stack.enter_context(TemporaryDirectory(prefix="noetl-metrics-"))
        supervisor = Multiprocess(config, [listener])
        config.announce()
        supervisor.run()
    return STARTUP_FAILURE if any(one.exitcode == STARTUP_FAILURE for one in supervisor.processes) else 0


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on the address: requests wait until a process answers."""
    # with an explicit protocol, without which asyncio does not turn Nagle's algorithm off
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        fail(f"the HTTP API cannot listen on {host}:{port}: {error}")
    return listener


def check_exposure(settings: Settings) -> None:
    """Refuses to listen beyond this machine without tokens, or with tokens in clear text, and invalid tokens."""
    host, tokens = settings.service_host, parse_tokens(settings.service_tokens)
    with suppress(ValueError):  # another name
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    if not tokens.required:
        fail(
            f"the HTTP API would listen on {host} without tokens; set NOETL_SERVICE_TOKENS, or listen on 127.0.0.1",
            code=2,
        )
    if settings.service_tls_cert is None and not settings.service_tls_terminated:
        fail(
            f"the HTTP API would listen on {host} without TLS; set NOETL_SERVICE_TLS_CERT and NOETL_SERVICE_TLS_KEY, "
            "or NOETL_SERVICE_TLS_TERMINATED=true if a proxy in front of it does TLS",
            code=2,
        )
