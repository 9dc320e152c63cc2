"""A worker that claims one command, keeps its heart beating, and completes it when a file appears."""

from __future__ import annotations

import asyncio
from pathlib import Path

from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.worker.command import CommandEvents, Outcome


def work(url: str, command_id: str, seconds: float, name: str, place: Path) -> None:
    """Works in a process of its own."""
    asyncio.run(_work(url, command_id, seconds, name, place))


async def _work(url: str, command_id: str, seconds: float, name: str, place: Path) -> None:
    pool = await open_pool(url, size=2)
    ids = Snowflake(process_node())
    handler = EventHandler(EventLog(pool, ids), seconds)
    claims = Claims(pool, seconds)
    claim = ids.next()
    if not await claims.claim(name, [claim], only=[command_id]):
        (place / f"{name}.refused").touch()
        return
    (place / f"{name}.claimed").touch()
    grant = await claims.queued(command_id)
    assert grant is not None
    events = CommandEvents(ids, worker_id=name)
    command = grant.context.command(grant.execution_id, None, claim)
    while not (place / f"{name}.finish").exists():
        await handler.take_events([events.heartbeat(command)])
        await asyncio.sleep(0.1)
    ended = events.ended(command, Outcome({"status": "ok", "data": name}))
    won = ended.event_id in (await handler.take_events([ended])).new
    (place / f"{name}.{'won' if won else 'lost'}").touch()
