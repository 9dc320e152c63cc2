"""``/health``, ``/ready`` and ``/metrics`` of processes that serve nothing else.

A thread answers, so that a process whose event loop stands still can say so. What it answers is what the loop has
noted: every two seconds it looks whether PostgreSQL and NATS answer, and whoever works in it notes each turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

import asyncpg
import nats.errors
import typer
from nats.aio.client import Client as NatsClient
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noetl_dagster.cli.console import fail, warn
from noetl_dagster.errors import ServiceError, VersionError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings

T = TypeVar("T")

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 3.0
AGAIN_SECONDS = 1.0

STUCK_SECONDS = 60.0
"""A loop that stands still for so long, while PostgreSQL and NATS answer, goes on no more."""

_SCHEMA = "SELECT to_regnamespace('noetl') IS NOT NULL"


class Health(Collector):
    """The health of a process: its event loop records it, and a thread reports it.

    Args:
        stuck_after: seconds without a turn after which it counts as stuck.

    Attributes:
        client: the connection to NATS that has to answer, where the process has one.
        working: it has all that it needs; its services are looked at.
        trouble: says what has ended that must not; None: nothing.
        active_at: when the work last progressed, monotonic; None if unknown.
    """

    def __init__(self, settings: Settings, *, stuck_after: float = STUCK_SECONDS) -> None:
        self._settings = settings
        self._stuck_after = stuck_after
        self._looked = self._answered = time.monotonic()
        self._unready: str | None = "starting"
        self._draining = False
        self._connection: asyncpg.Connection | None = None
        self.client: NatsClient | None = None
        self.trouble: Callable[[], str | None] = lambda: None
        self.active_at: Callable[[], float] | None = None
        self.working = False
        self.metrics = Metrics()

    def drain(self) -> None:
        """The process takes nothing more."""
        self._draining = True

    def starts(self, why: str) -> None:
        """It cannot begin yet."""
        self._unready = why

    def begins(self) -> None:
        """It has all that it needs; from now on its services are looked at."""
        self.working = True

    def stuck(self) -> str | None:
        """Why the process should be started again; None: it lives. Services that are away are no reason."""
        now = time.monotonic()
        if now - self._looked > self._stuck_after:
            return f"the event loop has stood still for {now - self._looked:.0f} s"
        if self._draining:
            return None
        if (trouble := self.trouble()) is not None:
            return trouble
        if self.active_at is not None and self._unready is None:
            still = now - max(self.active_at(), self._answered)
            if still > self._stuck_after:
                return f"the work has not gone on for {still:.0f} s"
        return None

    def unready(self) -> str | None:
        """Why it cannot do its work now; None: it can."""
        if self._draining:
            return "draining"
        if time.monotonic() - self._looked > 3 * (LOOK_SECONDS + ANSWER_SECONDS):
            return "the event loop stands still"
        return self._unready

    async def watch(self) -> None:
        """Looks at the services every two seconds, and is the turn of the event loop."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            if self._connection is not None:
                self._connection.terminate()

    async def look(self) -> None:
        """Checks that PostgreSQL and NATS answer and that the schema exists."""
        self._looked = time.monotonic()
        if not self.working:
            return
        why = await self._away()
        self._looked = time.monotonic()
        if self._unready is not None or why is not None:
            self._answered = self._looked  # the work may have waited till now
        self._unready = why

    async def _away(self) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if self._connection is None or self._connection.is_closed():
                    self._connection = await asyncpg.connect(self._settings.db_url)
                if not await self._connection.fetchval(_SCHEMA):
                    return "the event log has no schema; run 'noetl-dagster provision'"
        except (*DATABASE_AWAY, TimeoutError) as error:
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            return f"PostgreSQL does not answer: {type(error).__name__}"
        if self.client is not None:
            try:
                if not self.client.is_connected:
                    return "NATS does not answer: not connected"
                await self.client.flush(timeout=2)
            except (nats.errors.Error, OSError) as error:
                return f"NATS does not answer: {type(error).__name__}"
        return None

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of this process."""
        ready, live = self.unready() is None, self.stuck() is None
        yield GaugeMetricFamily("noetl_process_ready", "Whether the process can do its work", value=ready)
        yield GaugeMetricFamily("noetl_process_live", "Whether its loops go on", value=live)


async def opened(health: Health | None, open_: Callable[[], Awaitable[T]]) -> T:
    """Opens what a process needs. With a health port it waits, not ready, for services that are away.

    Raises:
        ServiceError: a service is unavailable, and there is no health port.
        VersionError: the schema refuses this version.
    """
    told = ""
    while True:
        try:
            return await open_()
        except ServiceError as error:
            if health is None or isinstance(error, VersionError):
                raise
            health.starts(str(error))
            if str(error) != told:
                told = str(error)
                warn(f"not ready: {told}")
            await asyncio.sleep(AGAIN_SECONDS)


@asynccontextmanager
async def healthy(settings: Settings) -> AsyncIterator[Health | None]:
    """Answers on NOETL_HEALTH_PORT until the block ends; None where it is not set."""
    if settings.health_port is None:
        yield None
        return
    health = Health(settings)
    server = _listening(settings.health_host, settings.health_port, health)
    thread = threading.Thread(target=server.serve_forever, name="noetl-health", daemon=True)
    thread.start()
    typer.echo(f"health on http://{settings.health_host}:{server.server_address[1]}")
    watching = asyncio.create_task(health.watch())
    try:
        yield health
    finally:
        await cancel_and_wait(watching)
        server.shutdown()
        server.server_close()


def _listening(host: str, port: int, health: Health) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/health":
                    self._say(health.stuck())
                case "/ready":
                    self._say(health.unready())
                case "/metrics":
                    self._answer(200, health.metrics.text(health), CONTENT_TYPE_PLAIN_0_0_4)
                case _:
                    self._answer(404, b"/health, /ready or /metrics\n")

        def _say(self, why: str | None) -> None:
            self._answer(200 if why is None else 503, f"{why or 'ok'}\n".encode())

        def _answer(self, status: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            with suppress(ConnectionError):
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Probes are no news."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    try:
        return Server((host, port), Handler)
    except OSError as error:
        fail(f"the health port cannot listen on {host}:{port}: {error}; set NOETL_HEALTH_PORT to a free one")
