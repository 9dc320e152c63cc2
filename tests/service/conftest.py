"""The HTTP API on a free port of this machine, over a database of its own; in this process, or as the command."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from noetl_dagster import embedded
from noetl_dagster.cli.api import choose_partition
from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.launcher.address import Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.service.app import create_app
from noetl_dagster.service.connections import bounded_connections
from noetl_dagster.service.plane import Plane
from noetl_dagster.settings import Settings
from tests.processes import killed_in_the_end
from tests.serving import bound
from tests.waiting import PROCESS_SECONDS, until_now


@dataclass
class Service:
    """A running service: its address, its insides, and a client without a token."""

    url: str
    settings: Settings
    plane: Plane
    client: httpx.AsyncClient


CLIENT = {CLIENT_HEADER: "tests", "content-type": "application/json"}
"""Headers of every request to the API."""

Wrap = Callable[[ASGIApp], ASGIApp]


@asynccontextmanager
async def serving(
    settings: Settings, wrap: Wrap | None = None, port: int = 0, **changes: Any
) -> AsyncIterator[Service]:
    """Serves until the block ends; the settings then name the service's address.

    Args:
        wrap: puts something before the application.
        port: 0 for any free one.
    """
    own = settings.model_copy(update=changes)
    opened: list[Plane] = []
    environment = {**os.environ, **embedded.environment(own), "DAGSTER_HOME": str(embedded.dagster_home(own))}
    address = Address.of(embedded.run_server_folder(own), environment, 2)

    @asynccontextmanager
    async def plane() -> AsyncIterator[Plane]:
        opened.append(await Plane.open(own, lambda engine: WarmLauncher(engine, address), choose_partition))
        yield opened[0]
        await opened[0].close()

    application = create_app(own, plane)
    config = uvicorn.Config(
        wrap(application) if wrap is not None else application,
        log_level="critical",
        timeout_graceful_shutdown=5,
        http=bounded_connections(own),
    )
    listener = bound(port)
    server = uvicorn.Server(config)
    server.capture_signals = nothing  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
        if running.done():
            running.result()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # without authorities: reading them takes longer than most of these tests
    async with httpx.AsyncClient(base_url=url, timeout=90, headers=CLIENT, verify=False) as client:
        yield Service(url, own.model_copy(update={"server_url": url}), opened[0], client)
    server.should_exit = True
    await running


Serving = Callable[..., AbstractAsyncContextManager[Service]]


class nothing:  # noqa: N801 - stands for a context manager function
    """uvicorn would take over the test process's signals."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings) as running:
        yield running


def samples(text: str) -> dict[tuple[Any, ...], float]:
    """The values of a scrape by name and labels."""
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


Start = Callable[..., "Process"]


class Process:
    """A ``noetl-dagster`` process, and what it has said."""

    def __init__(self, popen: subprocess.Popen[bytes], output: Path) -> None:
        self.popen = popen
        self._output = output

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def until_says(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            has_ended = self.popen.poll() is not None
            match = re.search(pattern, self.said())
            assert match or not has_ended, f"it has ended: {self.said()}"
            return match

        return until_now(found, f"{pattern} of a process that says {self.said()}")

    def terminate(self) -> int:
        """Asks it to end, and returns its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(PROCESS_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``noetl-dagster`` with some arguments, and further variables of its environment."""

    def start(settings: Settings, *arguments: str, **variables: str) -> Process:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NOETL_")}
        output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        with output.open("wb") as written:
            process = start_process(
                [sys.executable, "-m", "noetl_dagster", *arguments],
                env={**environment, **embedded.environment(settings), **variables},
                stdout=written,
                forks="--processes" not in arguments,  # uvicorn passes the standard input on to them
            )
        return Process(process, output)

    with killed_in_the_end() as start_process:
        yield start
