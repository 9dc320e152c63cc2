"""The control plane's upkeep without Dagster's daemon: ``project``, ``replay``, ``reap``, ``maintain``, ``missing``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Annotated, Any

import asyncpg
import orjson
import typer

from noetl_dagster import embedded
from noetl_dagster.cli.commands.ingest import stop_on_signals
from noetl_dagster.cli.console import fail, notes
from noetl_dagster.cli.health import Health, healthy, opened
from noetl_dagster.cli.session import open_session
from noetl_dagster.engine.loops.frames import release_expired
from noetl_dagster.engine.recovery.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY, open_pool
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import INTERVAL, Projection
from noetl_dagster.events.schema import open_settled_pool
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.storage.store import ResultStore

LONGEST_REAP_SECONDS = 600.0
"""Rows that dead drivers held are given back in databases of playbooks, which may be slow."""

Once = Annotated[bool, typer.Option("--once", help="do what is due and end")]


def project(
    once: Once = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="forget the projection, replay the log")] = False,
) -> None:
    """Keep noetl.execution up to date until interrupted. Any number may run at once."""
    asyncio.run(_project(once=once, rebuild=rebuild))


def reap(
    once: Once = False,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 10.0,
) -> None:
    """Give the commands of silent workers to others, until interrupted. Any number may run at once."""
    asyncio.run(_reap(once=once, interval=interval))


def maintain() -> None:
    """Make the coming months' partitions, drop old ones (NOETL_RETENTION_DAYS), delete expired results."""
    with open_session() as session:
        typer.echo(str(run_sync(session.engine.maintenance().run())))


def missing(
    execution_id: Annotated[
        int | None, typer.Argument(help="of this execution alone; default: of all", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: an object a line")] = False,
) -> None:
    """List results that the log knows and whose bytes are gone; exit code 1 when there are any."""
    raise typer.Exit(int(asyncio.run(_missing(execution_id, as_json=as_json)) > 0))


async def _missing(execution_id: int | None, *, as_json: bool) -> int:
    settings = embedded.ensure(get_settings())
    assert settings.db_url is not None
    pool = await open_pool(settings.db_url, size=2, application="noetl missing")
    found = 0
    try:
        async with ResultStore(settings, pool) as store:
            async for ref in store.missing(execution_id):
                found += 1
                place = {
                    "execution_id": str(ref.execution_id),
                    "step": ref.source_step,
                    "name": ref.name,
                    "physical_uri": ref.physical_uri,
                }
                line = "{execution_id} {step} {name}: nothing is at {physical_uri}".format(**place)
                typer.echo(orjson.dumps(place).decode() if as_json else line)
    finally:
        await pool.close()
    if found:
        notes.print(
            f"{found} results are gone: bring their objects back, or run these executions anew; "
            "one that needs a missing result fails when it is resumed"
        )
    return found


async def _project(*, once: bool, rebuild: bool) -> None:
    async with log_pool("noetl project") as (_, pool, health):
        projection = Projection(pool)
        if once or rebuild:
            taken = await (projection.rebuild() if rebuild else projection.catch_up())
            typer.echo(f"{taken} events projected, {await projection.lag_seconds():.1f} s behind")
            return
        await _repeat(
            "projecting the event log", projection.catch_up, INTERVAL, health, lambda: projection.active_at
        )


async def _reap(*, once: bool, interval: float) -> None:
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
async def log_pool(application: str) -> AsyncIterator[tuple[Settings, asyncpg.Pool, Health | None]]:
    """A few connections to the event log, with its schema applied; with the health port where it is set."""
    settings = embedded.ensure(get_settings(), only=["postgres"])
    async with healthy(settings) as health:
        pool = await opened(health, lambda: _connected(settings, application))
        try:
            yield settings, pool, health
        finally:
            await pool.close()


async def _connected(settings: Settings, application: str) -> asyncpg.Pool:
    return await open_settled_pool(settings, size=2, application=application)


async def _repeat(
    doing: str,
    work: Callable[[], Awaitable[Any]],
    interval: float,
    health: Health | None,
    further: Callable[[], float] = lambda: 0.0,
    *,
    longest: float = 60.0,
) -> None:
    """Does the work at intervals until a signal; a database that is away is waited for.

    Args:
        further: when the work itself last went on, monotonic.
        longest: seconds that it may take without saying so.
    """
    stop = stop_on_signals(health)
    ended = time.monotonic()
    if health is not None:
        health.active_at = lambda: max(ended, further()) + interval + longest
        health.begins()
    typer.echo(f"{doing}; end with Ctrl-C")
    while not stop.is_set():
        try:
            await work()
        except DATABASE_AWAY as error:
            typer.echo(f"the event log is away: {error}", err=True)
        ended = time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), interval)


class ReplayEngine(StrEnum):
    """Values of ``--engine``. Both replay in this process, which was faster than Spark at every measured size."""

    LOCAL = "local"
    SPARK = "spark"


def replay(
    every: Annotated[bool, typer.Option("--all", help="every execution of the log")] = False,
    engine: Annotated[
        ReplayEngine, typer.Option(help="'spark' replays in this process too, which is faster")
    ] = ReplayEngine.LOCAL,
) -> None:
    """Rebuild noetl.execution from the event log alone."""
    if not every:
        fail("replay rebuilds the projection of every execution; say so with --all")
    if engine is ReplayEngine.SPARK:
        notes.print("replaying in this process, which is faster than on Spark")
    typer.echo(asyncio.run(_replay()))


async def _replay() -> str:
    async with log_pool("noetl replay") as (_, pool, _):
        return f"{await Projection(pool).rebuild()} events replayed"
