"""``ingest``: the service that moves worker events from NATS into the log."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import asyncpg
import nats.errors
import typer

from noetl_dagster import embedded
from noetl_dagster.cli.health import Health, healthy, opened
from noetl_dagster.cli.stores import look_at_stores
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import open_settled_pool
from noetl_dagster.events.transport.capacity import CapacityKeeper
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import BATCH, Ingestor
from noetl_dagster.events.transport.nats import NatsClient, connect
from noetl_dagster.settings import Settings, get_settings


def ingest(
    batch: Annotated[int, typer.Option(min=1, help="events per transaction, at most")] = BATCH,
    once: Annotated[bool, typer.Option("--once", help="take what is there and end")] = False,
) -> None:
    """Move worker events from NATS into the event log until interrupted. Any number may run at once."""
    settings = embedded.ensure(get_settings(), only=["postgres", "nats"])
    asyncio.run(_ingest(settings, batch, once))


async def _ingest(settings: Settings, batch: int, once: bool) -> None:
    async with healthy(settings) as health:
        await look_at_stores(settings)
        pool, client = await opened(health, lambda: _connected(settings))
        if health is not None:
            health.client = client
        log = EventLog(pool, Snowflake(process_node()))
        ingestor = Ingestor(
            client,
            EventHandler(log, settings.command_heartbeat_timeout_seconds),
            batch=batch,
            observe=None if health is None else health.metrics.count_ingested,
        )
        for difference in await opened(health, lambda: _open_ingestor(ingestor)):
            typer.echo(difference, err=True)
        keeper = CapacityKeeper(client, pool)
        await keeper.open()
        try:
            if once:
                typer.echo(str(await ingestor.drain()))
            else:
                stop = stop_on_signals(health)
                if health is not None:
                    health.active_at = lambda: ingestor.active_at
                    health.begins()
                typer.echo("taking worker events from NATS; end with Ctrl-C")
                await ingestor.run(stop)
                typer.echo(str(ingestor.total))
        finally:
            await keeper.close()
            await ingestor.close()
            await client.close()
            await pool.close()


async def _connected(settings: Settings) -> tuple[asyncpg.Pool, NatsClient]:
    client = await connect(settings, "ingest")
    try:
        pool = await open_settled_pool(settings, size=4, application="noetl ingest")
    except BaseException:
        await client.close()
        raise
    return pool, client


async def _open_ingestor(ingestor: Ingestor) -> list[str]:
    try:
        return await ingestor.open()
    except (nats.errors.Error, OSError) as error:
        raise ServiceError(f"the stream of worker events cannot be made: {error!r}") from error


def stop_on_signals(health: Health | None = None) -> asyncio.Event:
    """Returns an event that SIGTERM and Ctrl-C set; from then on the process is not ready."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        if health is not None:
            health.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop
