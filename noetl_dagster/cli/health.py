"""``/health``, ``/ready`` and ``/metrics`` of processes that serve nothing else.

The server of ``prometheus_client`` answers in threads, so that a process with a blocked event loop can report that. It
answers what the loop has recorded: every two seconds the loop checks whether PostgreSQL and NATS answer, and the work
records its turns.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar
from wsgiref.types import StartResponse, WSGIEnvironment

import asyncpg
import nats.errors
import typer
from nats.aio.client import Client as NatsClient
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, start_wsgi_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noetl_dagster.cli.console import fail, warn
from noetl_dagster.errors import ServiceError, VersionError
from noetl_dagster.events.connection import DATABASE_ERRORS, connect
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings

T = TypeVar("T")

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 3.0
AGAIN_SECONDS = 1.0

STUCK_SECONDS = 60.0
"""A loop without a turn for this long, while PostgreSQL and NATS answer, is stuck."""

_SCHEMA = "SELECT to_regnamespace('noetl') IS NOT NULL"


class Health(Collector):
    """The health of a process: its event loop records it, and a thread reports it.

    Attributes:
        metrics: None without a health port.
        client: the connection to NATS that must answer, if the process has one.
        trouble: returns what has ended although it must not; None if there is nothing.
        active_at: when the work last progressed, monotonic; None if unknown.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looked = self._answered = time.monotonic()
        self._unready: str | None = "starting"
        self._draining = False
        self._connection: asyncpg.Connection | None = None
        self.metrics: Metrics | None = None
        self.client: NatsClient | None = None
        self.trouble: Callable[[], str | None] = lambda: None
        self.active_at: Callable[[], float] | None = None
        self._working = False

    async def open(self, open_: Callable[[], Awaitable[T]]) -> T:
        """Opens what the process needs. With a health port it waits, not ready, for unavailable services.

        Raises:
            ServiceError: a service is unavailable, and there is no health port.
            VersionError: the schema refuses this version.
        """
        reported = ""
        while True:
            try:
                return await open_()
            except ServiceError as error:
                if self._settings.health_port is None or isinstance(error, VersionError):
                    raise
                self._unready = str(error)
                if self._unready != reported:
                    reported = self._unready
                    warn(f"not ready: {reported}")
                await asyncio.sleep(AGAIN_SECONDS)

    def begins(self) -> None:
        """Records that the process has all that it needs; from now on its services are checked."""
        self._working = True

    def stop_on_signals(self) -> asyncio.Event:
        """Returns an event that SIGTERM and Ctrl-C set; from then on the process is not ready."""
        stop = asyncio.Event()

        def on_signal() -> None:
            stop.set()
            self._draining = True

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        return stop

    def stuck(self) -> str | None:
        """Returns why the process must be restarted, None if it lives. Unavailable services are no reason."""
        now = time.monotonic()
        if now - self._looked > STUCK_SECONDS:
            return f"the event loop has not run for {now - self._looked:.0f} s"
        if self._draining:
            return None
        if (trouble := self.trouble()) is not None:
            return trouble
        if self.active_at is not None and self._unready is None:
            still = now - max(self.active_at(), self._answered)
            if still > STUCK_SECONDS:
                return f"the work has not progressed for {still:.0f} s"
        return None

    def unready(self) -> str | None:
        """Returns why the process cannot work now, None if it can."""
        if self._draining:
            return "draining"
        if time.monotonic() - self._looked > 3 * (LOOK_SECONDS + ANSWER_SECONDS):
            return "the event loop does not run"
        return self._unready

    async def watch(self) -> None:
        """Checks the services every two seconds, which also records the turns of the event loop."""
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
        if not self._working:
            return
        why = await self._away()
        self._looked = time.monotonic()
        if self._unready is not None or why is not None:
            self._answered = self._looked  # the work may have waited until now
        self._unready = why

    async def _away(self) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if self._connection is None or self._connection.is_closed():
                    self._connection = await connect(str(self._settings.db_url), timeout=ANSWER_SECONDS)
                if not await self._connection.fetchval(_SCHEMA):
                    return "the event log has no schema; run 'noetl-dagster provision'"
        except (*DATABASE_ERRORS, TimeoutError) as error:
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
        yield GaugeMetricFamily("noetl_process_live", "Whether its loops progress", value=live)


@asynccontextmanager
async def healthy(settings: Settings) -> AsyncIterator[Health]:
    """Yields the health of this process; answers on NOETL_HEALTH_PORT, if that is set, until the block ends."""
    health = Health(settings)
    if settings.health_port is None:
        yield health
        return
    health.metrics = Metrics()
    host = settings.health_host
    try:
        server, _ = start_wsgi_server(settings.health_port, host)
    except OSError as error:
        fail(
            f"the health port cannot listen on {host}:{settings.health_port}: {error}; set NOETL_HEALTH_PORT to a free "
            "one"
        )
    server.set_app(partial(_answer, health, health.metrics))
    typer.echo(f"health on http://{f'[{host}]' if ':' in host else host}:{server.server_port}")
    watching = asyncio.create_task(health.watch())
    try:
        yield health
    finally:
        await cancel_and_wait(watching)
        server.shutdown()
        server.server_close()


def _answer(
    health: Health, metrics: Metrics, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    """Answers a request for ``/health``, ``/ready`` or ``/metrics``."""
    why, content, kind = None, b"ok\n", "text/plain; charset=utf-8"
    match environ["PATH_INFO"]:
        case "/health":
            why = health.stuck()
        case "/ready":
            why = health.unready()
        case "/metrics":
            content, kind = metrics.text(health), CONTENT_TYPE_PLAIN_0_0_4
        case _:
            start_response("404 Not Found", [("content-type", kind)])
            return [b"/health, /ready or /metrics\n"]
    start_response("200 OK" if why is None else "503 Service Unavailable", [("content-type", kind)])
    return [content if why is None else f"{why}\n".encode()]
