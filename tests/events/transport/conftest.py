"""An event log with one execution, a NATS connection, and events of that execution's commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.envelopes import to_result
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor, IngestReport
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings
from tests.waiting import until

IDS = Snowflake(1)


def started() -> Event:
    """The first event of a new execution."""
    return Event(IDS.next(), IDS.next(), EventType.PLAYBOOK_INITIALIZED, node_name="made-up", meta={"epoch": 1})


HOLD = """
INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, worker_id, claim_event_id,
                         attempts, context)
SELECT execution, name, 1, 'step', 'noop', 'leased', 'w1', 1, 1, jsonb_build_object('meta', jsonb_build_object(
    'command_id', name, 'attempt', 1, 'loop_id', '7', 'iter_index', index))
FROM (SELECT $1::bigint AS execution, index, format('%s:step:1:%s:1', $1::bigint, index) AS name
      FROM generate_series(0, $2::int - 1) AS index) commands
ON CONFLICT DO NOTHING
"""


async def hold(pool: asyncpg.Pool, execution_id: int, count: int) -> None:
    """Lets the worker w1 hold the first commands of an execution, whose ends :func:`ended` makes."""
    await pool.execute(HOLD, execution_id, count)


def meta_of(execution_id: int, index: int) -> dict[str, Any]:
    """The part of the meta that names a command."""
    command_id = f"{execution_id}:step:1:{index}:1"
    return {"command_id": command_id, "attempt": 1, "loop_id": "7", "iter_index": index}


def ended(execution_id: int, index: int, **changes: Any) -> Event:
    """A command's completion."""
    event = Event(
        execution_id=execution_id,
        event_id=IDS.next(),
        event_type=EventType.COMMAND_COMPLETED,
        node_name="step",
        status="COMPLETED",
        duration=0.25,
        meta=meta_of(execution_id, index),
        result=to_result({"status": "ok", "data": {"index": index}}),
        current_index=index,
        parent_event_id=1,
        worker_id="w1",
    )
    for name, value in changes.items():
        setattr(event, name, value)
    return event


@pytest.fixture
async def log(pool: asyncpg.Pool) -> EventLog:
    return EventLog(pool, IDS)


@pytest.fixture
async def handler(log: EventLog) -> EventHandler:
    return EventHandler(log, lease_seconds=30)


@pytest.fixture
async def execution_id(log: EventLog) -> int:
    event = started()
    await log.append([event])
    await hold(log.pool, event.execution_id, 200)
    return event.execution_id


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[NatsClient]:
    client = await connect(settings, "test")
    yield client
    await client.close()


@pytest.fixture
def names(settings: Settings) -> NatsNames:
    return NatsNames(settings)


@pytest.fixture
async def ingestor(client: NatsClient, handler: EventHandler, settings: Settings) -> AsyncIterator[Ingestor]:
    ingestor = Ingestor(client, handler, redelivery=(1.0, 0.05))
    await ingestor.open()
    yield ingestor
    await ingestor.close()


Drain = Callable[..., Awaitable[IngestReport]]


@pytest.fixture
def drain(client: NatsClient, names: NatsNames) -> Drain:
    """Ingests until the stream is empty, what is delivered again included; gives the ingestor's totals."""

    async def drain(ingestor: Ingestor) -> IngestReport:
        async def empty() -> bool:
            await ingestor.drain(quiet_seconds=0.1)
            stream = await client.jetstream().stream_info(names.event_stream)
            return stream.state.messages == 0

        await until(empty, "an empty stream")
        return ingestor.total

    return drain


Ids = Callable[[int], Awaitable[set[int]]]


@pytest.fixture
def logged(log: EventLog) -> Ids:
    """Ids of the commands' events that the log holds."""

    async def logged(execution_id: int) -> set[int]:
        return {
            event.event_id
            async for event in log.events(execution_id)
            if event.event_type != EventType.PLAYBOOK_INITIALIZED
        }

    return logged
