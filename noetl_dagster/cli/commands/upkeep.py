"""Upkeep by hand: ``project``, ``replay``, ``reap``, ``maintain``, ``dead-letters``. The API and Dagster repeat it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import asyncpg
import typer
from rich.markup import escape
from rich.table import Table

from noetl_dagster import embedded
from noetl_dagster.cli.console import Json, announce_start, console, fail, print_json
from noetl_dagster.cli.session import open_session
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.schema import open_pool_with_schema
from noetl_dagster.events.transport.dead_letters import DeadLetters
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.events.transport.wire import EventLimits
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, get_settings

letters_app = typer.Typer(no_args_is_help=True, add_completion=False)

PAGE = 500
"""Dead letters that are read at a time."""


@asynccontextmanager
async def log_pool(application: str) -> AsyncIterator[tuple[Settings, asyncpg.Pool]]:
    """Opens a few connections to the event log, with its schema applied."""
    settings = embedded.ensure(get_settings(), ["postgres"], announce_start)
    pool = await open_pool_with_schema(settings, size=2, application=application)
    try:
        yield settings, pool
    finally:
        await pool.close()


async def project() -> None:
    """Apply the events to noetl.execution that it does not have yet."""
    async with log_pool("noetl project") as (_, pool):
        projection = Projection(pool)
        count = await projection.catch_up()
        typer.echo(f"{count} events projected, {await projection.lag_seconds():.1f} s behind")


async def replay(
    every: Annotated[bool, typer.Option("--all", help="confirm that every execution is rebuilt")] = False,
) -> None:
    """Rebuild noetl.execution from the event log alone."""
    if not every:
        fail("replay rebuilds the projection of every execution; confirm with --all")
    async with log_pool("noetl replay") as (_, pool):
        typer.echo(f"{await Projection(pool).rebuild()} events replayed")


def reap() -> None:
    """Requeue the commands of silent workers, and release the rows that dead cursor loops claimed."""
    with open_session(quickly=True) as session:
        typer.echo(str(run_sync(session.engine.reaper().reap())))


def maintain() -> None:
    """Create and drop partitions of the event log, and delete expired results.

    A partition has a month, or NOETL_PARTITION_HOURS. Three are created ahead, and old ones are dropped after
    NOETL_RETENTION_DAYS.
    """
    with open_session() as session:
        typer.echo(str(run_sync(session.engine.maintenance().run())))


@letters_app.command(name="list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="how many, the newest first")] = 20,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest first."""

    async def show() -> None:
        async with _dead_letters() as letters:
            shown, count = await letters.newest(limit), await letters.count()
        if as_json:
            print_json([one._asdict() for one in shown])
            return
        table = Table("id", "put aside", "bytes", "reason", "content", box=None)
        for one in shown:
            texts = escape(one.error), escape(one.preview[:60])
            table.add_row(str(one.id), f"{one.created_at:%Y-%m-%d %H:%M:%S}", str(one.size), *texts)
        console.print(table if shown else "no dead letters")
        if count > len(shown):
            console.print(f"{count - len(shown)} older ones are not shown; see --limit")

    run_sync(show())


@letters_app.command()
def reprocess(
    letter_id: Annotated[int | None, typer.Argument(help="id of a dead letter", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="reprocess all of them")] = False,
) -> None:
    """Process dead letters again, as if their messages had just arrived; exit code 1 if one is kept."""
    if (letter_id is None) is not every:
        fail("give the id of a dead letter, or --all")

    async def work() -> int:
        failures = 0
        async with _dead_letters() as letters:
            async for one in _chosen(letters, letter_id):
                outcome = await letters.reprocess(one)
                if outcome is None:
                    what = "not found; it may have been reprocessed before"
                else:
                    stored = f"{outcome.new} events stored, {outcome.known} known already"
                    what = f"kept: {outcome.error}" if outcome.error else stored
                failures += outcome is None or outcome.error is not None
                typer.echo(f"dead letter {one}: {what}")
        return failures

    if run_sync(work()):
        raise typer.Exit(1)


async def _chosen(letters: DeadLetters, letter_id: int | None) -> AsyncIterator[int]:
    if letter_id is not None:
        yield letter_id
        return
    before = None
    while page := await letters.newest(PAGE, before=before):
        for one in page:
            yield one.id
        before = page[-1].id


@asynccontextmanager
async def _dead_letters() -> AsyncIterator[DeadLetters]:
    async with log_pool("noetl dead-letters") as (settings, pool):
        handler = EventHandler(EventLog(pool, Snowflake(process_node())), settings.command_heartbeat_timeout_seconds)
        yield DeadLetters(handler, NatsNames(settings), EventLimits.of(settings))
