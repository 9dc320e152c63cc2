"""``dead-letters``: messages of workers that could not be ingested."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from noetl_dagster import embedded
from noetl_dagster.cli.console import Json, announce_start, console, fail, print_json
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import open_settled_pool
from noetl_dagster.events.transport.dead_letters import DeadLetters
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.events.transport.wire import EventLimits
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import get_settings

app = typer.Typer(no_args_is_help=True, add_completion=False)

PAGE = 500


@app.command(name="list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="how many, the newest first")] = 20,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest first."""

    async def found() -> None:
        async with _opened() as letters:
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

    run_sync(found())


@app.command()
def reprocess(
    letter_id: Annotated[int | None, typer.Argument(help="id of a dead letter", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="reprocess all of them")] = False,
) -> None:
    """Process dead letters again, as if their messages had just arrived; exit code 1 if one is kept."""
    if (letter_id is None) is not every:
        fail("give the id of a dead letter, or --all")

    async def work() -> int:
        kept = 0
        async with _opened() as letters:
            async for one in _chosen(letters, letter_id):
                done = await letters.reprocess(one)
                if done is None:
                    what = "not found; it may have been reprocessed before"
                else:
                    what = (
                        f"kept: {done.error}" if done.error else f"{done.new} events stored, {done.known} known already"
                    )
                kept += done is None or done.error is not None
                typer.echo(f"dead letter {one}: {what}")
        return kept

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
async def _opened() -> AsyncIterator[DeadLetters]:
    settings = embedded.ensure(get_settings(), ["postgres"], announce_start)
    pool = await open_settled_pool(settings, size=2, application="noetl dead-letters")
    try:
        log = EventLog(pool, Snowflake(process_node()))
        handler = EventHandler(log, settings.command_heartbeat_timeout_seconds)
        yield DeadLetters(handler, NatsNames(settings), EventLimits.of(settings))
    finally:
        await pool.close()
