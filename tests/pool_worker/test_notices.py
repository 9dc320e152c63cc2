"""Notices of commands go to whoever has room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from nats.aio.client import Client as NatsClient

from noetl_dagster.events.transport.nats import streams
from noetl_dagster.events.transport.nats.connection import connect
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.pool_worker.notices import Notices
from noetl_dagster.settings import Settings
from tests.waiting import PATIENCE_SECONDS, until


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[NatsClient]:
    client = await connect(settings, "test")
    yield client
    await client.close()


async def test_a_worker_without_room_keeps_nothing_from_the_others(
    client: NatsClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ACK_SECONDS", 3_600.0)  # no notice comes again on its own
    names, room = Names.of(settings), {"busy": 4, "idle": 0}
    busy = Notices(client, settings, "busy", lambda kind: room["busy"])
    idle = Notices(client, settings, "idle", lambda kind: room["idle"])
    await busy.open()
    await idle.open()

    async def asked() -> int:
        return (await client.jetstream().consumer_info(names.command_stream, "workers")).num_waiting or 0

    await until(asked, "the request of the worker with room")
    room["busy"] = 0  # its own commands have come meanwhile
    busy.freed.set()
    await until(lambda: not busy.freed.is_set(), "the worker to see that it has no room")
    for number in range(4):
        notice = {"execution_id": 1, "command_id": f"command {number}"}
        await client.jetstream().publish(names.commands, orjson.dumps(notice))
    room["idle"] = 10
    async with asyncio.timeout(PATIENCE_SECONDS):
        offers = [await idle.next() for _ in range(4)]
    assert {offer.notice.command_id for offer in offers} == {f"command {number}" for number in range(4)}
    for offer in offers:
        await offer.message.ack()
    await busy.close()
    await idle.close()
