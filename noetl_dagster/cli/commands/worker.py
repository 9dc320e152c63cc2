"""``worker``: a process of the pool."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Annotated

import orjson
import typer

from noetl_dagster import embedded
from noetl_dagster.cli.commands.ingest import stop_on_signals
from noetl_dagster.cli.console import fail
from noetl_dagster.cli.health import healthy, opened
from noetl_dagster.cli.stores import look_at_stores
from noetl_dagster.pool_worker.worker import PoolWorker
from noetl_dagster.settings import POOL_NAME, EventTransport, Settings, settings_with
from noetl_dagster.worker.command import own_worker_id


def worker(
    slots: Annotated[int | None, typer.Option(min=1, help="commands at once; NOETL_WORKER_SLOTS")] = None,
    pool: Annotated[
        str | None, typer.Option(help="the pool whose commands it takes; NOETL_WORKER_POOL")
    ] = None,
    pools: Annotated[
        str | None, typer.Option(help='commands at once by tool kind, JSON: {"postgres": 4}', metavar="JSON")
    ] = None,
    transport: Annotated[
        EventTransport | None, typer.Option(help="how events reach the log; NOETL_EVENT_TRANSPORT")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="its name; by default host and process")
    ] = None,
) -> None:
    """Run commands of steps with ``dispatch: workers`` until interrupted; ends what runs before it goes."""
    own_pools = None if pools is None else _pools(pools)
    if pool is not None and re.fullmatch(POOL_NAME, pool) is None:
        fail(f"--pool {pool!r}: write small letters, digits and hyphens, 63 at most", code=2)
    settings = embedded.ensure(
        settings_with(
            worker_pool=pool, worker_slots=slots, event_transport=transport, worker_tool_pools=own_pools
        )
    )
    asyncio.run(_work(settings, worker_id or own_worker_id()))


async def _work(settings: Settings, worker_id: str) -> None:
    async with healthy(settings) as health:
        await look_at_stores(settings)
        working = await opened(health, lambda: PoolWorker.open(settings, worker_id))
        if health is not None:
            health.client = working.client
            health.trouble = lambda: working.trouble
        gc.freeze()  # loaded modules stay: no garbage collection visits them while commands wait
        stop = stop_on_signals(health)
        typer.echo(
            f"worker {worker_id}: pool {settings.worker_pool}, {settings.worker_slots} slots, "
            f"events over {settings.event_transport}"
        )
        try:
            await working.run(stop, begun=lambda: None if health is None else health.begins())
        finally:
            await working.close()


def _pools(text: str) -> dict[str, int]:
    try:
        pools = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        fail(f"--pools {text!r}: {error}", code=2)
    if not isinstance(pools, dict) or not all(isinstance(size, int) and size >= 0 for size in pools.values()):
        fail(f'--pools {text!r}: write numbers by tool kind, {{"postgres": 4}}', code=2)
    return pools
