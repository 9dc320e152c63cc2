"""``ingest``: the service that moves worker events from NATS into the log."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

import nats.errors
import typer

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start, warn_of_stores
from noetl_dagster.cli.health import healthy
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import open_pool_with_schema
from noetl_dagster.events.transport.capacity import CapacityListener
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import BATCH, Ingestor
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.settings import get_settings


async def ingest(
    batch: Annotated[int, typer.Option(min=1, help="largest number of events in a transaction")] = BATCH,
    once: Annotated[bool, typer.Option("--once", help="ingest the waiting events, and end")] = False,
) -> None:
    """Move worker events from NATS into the event log until interrupted.

    Any number of these processes may run at once.
    """
    settings = embedded.ensure(get_settings(), ["postgres", "nats"], announce_start)
    async with healthy(settings) as health, AsyncExitStack() as opened:
        await warn_of_stores(settings)
        pool = await health.open(lambda: open_pool_with_schema(settings, size=4, application="noetl ingest"))
        opened.push_async_callback(pool.close)
        health.client = client = await health.open(lambda: connect(settings, "ingest"))
        opened.push_async_callback(client.close)
        log = EventLog(pool, Snowflake(process_node()))
        ingestor = Ingestor(
            client,
            EventHandler(log, settings.command_heartbeat_timeout_seconds),
            batch=batch,
            observe=None if health.metrics is None else health.metrics.count_ingested,
        )
        for difference in await health.open(lambda: _open_ingestor(ingestor)):
            typer.echo(difference, err=True)
        opened.push_async_callback(ingestor.close)
        keeper = CapacityListener(client, pool)
        await keeper.open()
        opened.push_async_callback(keeper.close)
        if once:
            typer.echo(str(await ingestor.drain()))
            return
        stop = health.stop_on_signals()
        health.active_at = lambda: ingestor.active_at
        health.begins()
        typer.echo("taking worker events from NATS; end with Ctrl-C")
        await ingestor.run(stop)
        typer.echo(str(ingestor.total))


async def _open_ingestor(ingestor: Ingestor) -> list[str]:
    try:
        return await ingestor.open()
    except (nats.errors.Error, OSError) as error:
        raise ServiceError(f"the stream of worker events cannot be made: {error!r}") from error
