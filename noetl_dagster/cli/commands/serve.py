"""``serve``: the HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start, fail, warn_of_stores
from noetl_dagster.cli.service_processes import ParentProcess, ServiceProcesses
from noetl_dagster.service.tokens import parse_tokens
from noetl_dagster.settings import METRICS_FOLDER, Settings, settings_with


def serve(
    host: Annotated[str | None, typer.Option(help="address to listen on; NOETL_SERVICE_HOST")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free port; NOETL_SERVICE_PORT")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="processes behind the address; NOETL_SERVICE_PROCESSES")
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the HTTP API, and move worker events from NATS into the event log."""
    given = settings_with(service_host=host, service_port=port, service_processes=processes)
    settings = embedded.ensure(given, announce=announce_start)
    check_exposure(settings)
    if parent is not None:
        one = ParentProcess(parent)
        # SIGINT of a terminal reaches the parent too, which ends the others
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
        one.end_with_it()
        listener, ready = one.listener, one.report_ready
    else:
        asyncio.run(warn_of_stores(settings))
        listener = _bound(settings.service_host, settings.service_port)
        scheme = "https" if settings.service_tls_cert is not None else "http"

        def ready() -> None:
            typer.echo(f"HTTP API on {scheme}://{settings.service_host}:{listener.getsockname()[1]}")

        if settings.service_processes > 1:
            sys.exit(_serve_with_several(settings, listener, ready))
    from noetl_dagster.cli.api import serve_api  # imports much that the parent of several does not need

    serve_api(settings, listener, ready)


def _serve_with_several(settings: Settings, listener: socket.socket, ready: Callable[[], None]) -> int:
    """Serves with several processes on the socket; returns the exit code."""
    from prometheus_client.multiprocess import mark_process_dead

    with ExitStack() as stack:
        folder = os.environ.get(METRICS_FOLDER)
        if not folder:
            folder = stack.enter_context(TemporaryDirectory(prefix="noetl-metrics-"))
        processes = ServiceProcesses(
            (sys.executable, "-m", "noetl_dagster", "serve", "--parent"),
            settings.service_processes,
            listener,
            environment={**os.environ, **embedded.environment(settings), METRICS_FOLDER: folder},
            ready=ready,
            ended=lambda pid: mark_process_dead(pid, folder),  # type: ignore[no-untyped-call]
        )
        return asyncio.run(processes.run())


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address; it listens once a process is ready to answer."""
    # with an explicit protocol, without which asyncio does not turn Nagle's algorithm off
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
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
