"""``replay``: the projection of every execution, made again from the event log."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import asyncpg
import typer

from noetl_dagster.cli.commands.upkeep.control import log_pool
from noetl_dagster.cli.console import fail, notes
from noetl_dagster.events.projection.projector import Projection
from noetl_dagster.settings import Settings


class Engine(StrEnum):
    """Who replays: this process, or a Spark cluster (``NOETL_SPARK_MASTER``, ``NOETL_SPARK_REMOTE``)."""

    LOCAL = "local"
    SPARK = "spark"


def replay(
    every: Annotated[bool, typer.Option("--all", help="every execution of the log")] = False,
    engine: Annotated[Engine, typer.Option(help="'spark' reads the log in parallel")] = Engine.LOCAL,
) -> None:
    """Rebuild noetl.execution from the event log alone."""
    if not every:
        fail("replay rebuilds the projection of every execution; say so with --all")
    typer.echo(asyncio.run(_replay(engine)))


async def _replay(engine: Engine) -> str:
    async with log_pool("noetl replay") as (settings, pool, _):
        if engine is Engine.SPARK:
            return await _on_spark(settings, pool)
        return f"{await Projection(pool).rebuild()} events replayed"


async def _on_spark(settings: Settings, pool: asyncpg.Pool) -> str:
    from noetl_dagster.spark.replay import replay_all
    from noetl_dagster.spark.sessions import SparkSessions

    def tell(message: str) -> None:
        notes.print(message, markup=False, highlight=False)

    sessions = SparkSessions(settings)
    try:
        spark = await asyncio.to_thread(sessions.get)
        done = await replay_all(pool, spark, settings, tell)
    finally:
        await asyncio.to_thread(sessions.stop)
    return f"{done.events} events replayed on Spark, {done.executions} executions"
