"""``ingest``: the service that moves worker events from NATS into the log."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from noetl_dagster import embedded
from noetl_dagster.cli.stores import look_at_stores
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.transport.capacity import CapacityKeeper
from noetl_dagster.transport.ingest import BATCH, Ingestor
from noetl_dagster.transport.intake import EventIntake
from noetl_dagster.transport.nats.connection import connect


def ingest(
    batch: Annotated[int, typer.Option(min=1, help="events per transaction, at most")] = BATCH,
    once: Annotated[bool, typer.Option("--once", help="take what is there and end")] = False,
) -> None:
    """Move worker events from NATS into the event log until interrupted. Any number may run at once."""
    settings = embedded.ensure(get_settings(), only=["postgres", "nats"])
    asyncio.run(_ingest(settings, batch, once))


async def _ingest(settings: Settings, batch: int, once: bool) -> None:
    assert settings.db_url is not None
    await look_at_stores(settings)
    pool = await open_pool(settings.db_url, size=4, application="noetl ingest")
    client = await connect(settings, "ingest")
    log = EventLog(pool, Snowflake(process_node()))
    ingestor = Ingestor(
        client, EventIntake(log, settings.command_heartbeat_timeout_seconds), settings, batch=batch
    )
    for difference in await ingestor.open():
        typer.echo(difference, err=True)
    keeper = CapacityKeeper(client, pool, settings)
    await keeper.open()
    try:
        if once:
            typer.echo(str(await ingestor.drain()))
        else:
            stop = stop_on_signals()
            typer.echo("taking worker events from NATS; end with Ctrl-C")
            await ingestor.run(stop)
            typer.echo(str(ingestor.total))
    finally:
        await keeper.close()
        await ingestor.close()
        await client.close()
        await pool.close()


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and Ctrl-C set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
