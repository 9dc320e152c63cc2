"""The event log on a database of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from noetl_dagster.events.connection import prepare_connection
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings

MakeEvent = Callable[..., Event]


@pytest.fixture
def ids() -> Snowflake:
    return Snowflake(7)


@pytest.fixture
def log(pool: asyncpg.Pool[Any], ids: Snowflake) -> EventLog:
    return EventLog(pool, ids)


@pytest.fixture
def event(ids: Snowflake) -> MakeEvent:
    """Makes events with ids of their own."""

    def make(execution_id: int, type_: EventType, **fields: Any) -> Event:
        return Event(execution_id, ids.next(), type_, **fields)

    return make


@asynccontextmanager
async def connections(settings: Settings, count: int) -> AsyncIterator[list[asyncpg.Connection[Any]]]:
    """Real connections, one for each racer."""
    assert settings.db_url is not None
    opened = await asyncio.gather(*(asyncpg.connect(settings.db_url) for _ in range(count)))
    await asyncio.gather(*(prepare_connection(connection) for connection in opened))
    try:
        yield opened
    finally:
        await asyncio.gather(*(connection.close() for connection in opened))
