"""Upkeep without Dagster's daemon: ``project``, ``replay``, ``reap`` and ``maintain``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Annotated, Any

import asyncpg
import typer

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start, fail, note
from noetl_dagster.cli.health import Health, healthy
from noetl_dagster.cli.session import open_session
from noetl_dagster.engine.loops.frames import release_expired
from noetl_dagster.engine.recovery.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import INTERVAL, Projection
from noetl_dagster.events.schema import open_settled_pool
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, get_settings

LONGEST_REAP_SECONDS = 600.0
"""Releasing the rows of dead drivers takes place in databases of playbooks, which may be slow."""

Once = Annotated[bool, typer.Option("--once", help="do the due work once, and end")]


async def project(
    once: Once = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="project the whole log again")] = False,
) -> None:
    """Keep noetl.execution up to date until interrupted.

    Any number of these processes may run at once.
    """
    async with log_pool("noetl project") as (_, pool, health):
        projection = Projection(pool)
        if once or rebuild:
            taken = await (projection.rebuild() if rebuild else projection.catch_up())
            typer.echo(f"{taken} events projected, {await projection.lag_seconds():.1f} s behind")
            return
        await _repeat("projecting the event log", projection.catch_up, INTERVAL, health, lambda: projection.active_at)


async def reap(
    once: Once = False,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two passes")] = 10.0,
) -> None:
    """Requeue the commands of silent workers until interrupted.

    Any number of these processes may run at once.
    """
    async with log_pool("noetl reap") as (settings, pool, health):
        ids = Snowflake(process_node())
        handler = EventHandler(EventLog(pool, ids), settings.command_heartbeat_timeout_seconds)

        async def release() -> int:
            runtime = await Runtime.open(settings, apply=False)
            try:
                return await release_expired(runtime)
            finally:
                await runtime.close()

        reaper = Reaper(pool, handler, ids, release=release)
        if once:
            typer.echo(str(await reaper.reap()))
            return

        async def look() -> None:
            reaped = await reaper.reap()
            if reaped.requeued or reaped.failed or reaped.withdrawn or reaped.released:
                typer.echo(str(reaped))

        await _repeat("looking for claims that expire", look, interval, health, longest=LONGEST_REAP_SECONDS)


@asynccontextmanager
async def log_pool(application: str) -> AsyncIterator[tuple[Settings, asyncpg.Pool, Health]]:
    """Opens a few connections to the event log, with its schema applied, and the health port if it is set."""
    settings = embedded.ensure(get_settings(), ["postgres"], announce_start)
    async with healthy(settings) as health:
        pool = await health.open(lambda: open_settled_pool(settings, size=2, application=application))
        try:
            yield settings, pool, health
        finally:
            await pool.close()


async def _repeat(
    doing: str,
    work: Callable[[], Awaitable[Any]],
    interval: float,
    health: Health,
    progressed: Callable[[], float] = lambda: 0.0,
    *,
    longest: float = 60.0,
) -> None:
    """Repeats the work at intervals until a signal, also after an outage of the database.

    Args:
        progressed: returns when the work itself last progressed, monotonic.
        longest: seconds that one pass may take without progress.
    """
    stop = health.stop_on_signals()
    ended = time.monotonic()
    health.active_at = lambda: max(ended, progressed()) + interval + longest
    health.begins()
    typer.echo(f"{doing}; end with Ctrl-C")
    while not stop.is_set():
        try:
            await work()
        except DATABASE_AWAY as error:
            typer.echo(f"the event log is unavailable: {error}", err=True)
        ended = time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), interval)


class ReplayEngine(StrEnum):
    """Values of ``--engine``. Both replay in this process, which was faster than Spark at every measured size."""

    LOCAL = "local"
    SPARK = "spark"


async def replay(
    every: Annotated[bool, typer.Option("--all", help="confirm that every execution is rebuilt")] = False,
    engine: Annotated[
        ReplayEngine, typer.Option(help="'spark' replays in this process too, which is faster")
    ] = ReplayEngine.LOCAL,
) -> None:
    """Rebuild noetl.execution from the event log alone."""
    if not every:
        fail("replay rebuilds the projection of every execution; confirm with --all")
    if engine is ReplayEngine.SPARK:
        note("replaying in this process, which is faster than on Spark")
    async with log_pool("noetl replay") as (_, pool, _):
        typer.echo(f"{await Projection(pool).rebuild()} events replayed")


def maintain() -> None:
    """Create and drop partitions of the event log, and delete expired results.

    A partition has a month, or NOETL_PARTITION_HOURS. Three are created ahead, and old ones are dropped after
    NOETL_RETENTION_DAYS.
    """
    with open_session() as session:
        typer.echo(str(run_sync(session.engine.maintenance().run())))
