"""``worker`` and ``ingest``: processes of a deployment that serve no address but that of their health."""

from __future__ import annotations

import gc
import re
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated

import nats.errors
import typer
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start, fail, warn_of_stores
from noetl_dagster.cli.health import healthy
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import open_pool_with_schema
from noetl_dagster.events.transport.capacity import CapacityListener
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import BATCH, Ingestor
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.pool_worker.worker import PoolWorker
from noetl_dagster.process.environment import withhold_settings
from noetl_dagster.settings import POOL_NAME, EventTransport, get_settings, settings_with
from noetl_dagster.worker.command import own_worker_id


async def worker(
    slots: Annotated[int | None, typer.Option(min=1, help="concurrent commands; NOETL_WORKER_SLOTS")] = None,
    pool: Annotated[str | None, typer.Option(help="pool to serve; NOETL_WORKER_POOL")] = None,
    pools: Annotated[
        str | None, typer.Option(help='concurrent commands by tool kind: {"postgres": 4}', metavar="JSON")
    ] = None,
    transport: Annotated[
        EventTransport | None, typer.Option(help="how events reach the log; NOETL_EVENT_TRANSPORT")
    ] = None,
    worker_id: Annotated[str | None, typer.Option("--id", help="name of the worker; default: host and process")] = None,
) -> None:
    """Run commands of steps with ``dispatch: workers`` until interrupted.

    The process finishes its running commands before it ends.
    """
    if pool is not None and re.fullmatch(POOL_NAME, pool) is None:
        fail(f"--pool {pool!r}: use lower-case letters, digits and hyphens, at most 63", code=2)
    settings = embedded.ensure(
        settings_with(
            worker_pool=pool,
            worker_slots=slots,
            event_transport=transport,
            worker_tool_pools=None if pools is None else _pools(pools),
        ),
        announce=announce_start,
    )
    withhold_settings()  # from the code of playbooks
    worker_id = worker_id or own_worker_id()
    async with healthy(settings) as health:
        await warn_of_stores(settings)
        working = await health.open(partial(PoolWorker.open, settings, worker_id))
        health.client = working.client
        health.trouble = lambda: working.trouble
        gc.freeze()  # loaded modules stay: no garbage collection visits them while commands wait
        stop = health.stop_on_signals()
        typer.echo(
            f"worker {worker_id}: pool {settings.worker_pool}, {settings.worker_slots} slots, "
            f"events over {settings.event_transport}"
        )
        try:
            await working.run(stop, begun=health.begins)
        finally:
            await working.close()


def _pools(text: str) -> dict[str, int]:
    try:
        return TypeAdapter(dict[str, NonNegativeInt]).validate_json(text, strict=True)
    except ValidationError:
        fail(f'--pools {text!r}: write JSON, numbers by tool kind: {{"postgres": 4}}', code=2)


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
