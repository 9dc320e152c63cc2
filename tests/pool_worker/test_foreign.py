"""A worker that uses none of our code: a NATS client, an HTTP client and docs/protocol.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import suppress
from typing import Any

import httpx
import nats
import nats.errors
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.service.conftest import serving
from tests.waiting import PATIENCE_SECONDS, until


class ForeignWorker:
    """Runs steps whose tool is ``noop``: it gives back the square of the item."""

    def __init__(self, nats_url: str, server_url: str, namespace: str, event_prefix: str) -> None:
        self.nats_url, self.namespace, self.event_prefix = nats_url, namespace, event_prefix
        self.http = httpx.AsyncClient(base_url=server_url)
        self.sequence = itertools.count()
        self.node = 0
        self.claimed = 0

    def identifier(self) -> str:
        milliseconds = time.time_ns() // 1_000_000 - 1_704_067_200_000
        return str(milliseconds << 22 | self.node << 12 | next(self.sequence) % 4096)

    async def run(self) -> None:
        report = {
            "worker_id": "foreign",
            "status": "ready",
            "slots": 1,
            "available_slots": 1,
            "interval": 600,
        }
        self.node = (await self.http.post("/api/workers", json=report)).json()["node"]
        connection = await nats.connect(self.nats_url)
        stream = connection.jetstream()
        await connection.publish(f"{self.namespace}.workers.foreign", json.dumps(report).encode())
        commands = f"{self.namespace.upper()}_COMMANDS"
        own = await stream.pull_subscribe(
            f"{self.namespace}.commands.foreign", durable="worker-foreign", stream=commands
        )
        broadcast = await stream.pull_subscribe(
            f"{self.namespace}.commands", durable="workers", stream=commands
        )
        try:
            while True:
                for source in (own, broadcast):
                    with suppress(nats.errors.TimeoutError):
                        for message in await source.fetch(1, timeout=0.2):
                            await self.work(stream, json.loads(message.data))
                            await message.ack()
        finally:
            await connection.close()
            await self.http.aclose()

    async def work(self, stream: Any, notice: dict[str, Any]) -> None:
        answer = await self.http.post(
            f"/api/commands/{notice['command_id']}/claim",
            json={
                "execution_id": notice["execution_id"],
                "worker_id": "foreign",
                "event_id": self.identifier(),
            },
        )
        if answer.status_code != 200:
            return
        self.claimed += 1
        event = self.end(notice["execution_id"], answer.json()["context"])
        await stream.publish(
            f"{self.event_prefix}.{notice['execution_id']}.command.completed",
            json.dumps(event).encode(),
            headers={"Nats-Msg-Id": event["event_id"]},
        )

    def end(self, execution_id: str, context: dict[str, Any]) -> dict[str, Any]:
        return {
            "execution_id": execution_id,
            "event_id": self.identifier(),
            "event_type": "command.completed",
            "payload": {
                "node_name": context["step"],
                "status": "COMPLETED",
                "current_index": context["index"],
                "result": {"status": "ok", "data": context["item"] ** 2},
            },
            "meta": context["meta"],
            "worker_id": "foreign",
        }


class ForeignBatchWorker(ForeignWorker):
    """The same, many commands at once."""

    PLACES = 5

    async def run(self) -> None:
        report = {"worker_id": "foreign", "slots": self.PLACES, "available_slots": self.PLACES, "batch": True}
        registered = (await self.http.post("/api/workers", json=report)).json()
        self.node = registered["node"]
        assert registered["batch"]
        connection = await nats.connect(self.nats_url)
        stream, woken = connection.jetstream(), asyncio.Event()

        async def wake(message: Any) -> None:
            woken.set()

        for subject in (f"{self.namespace}.wake", f"{self.namespace}.wake.foreign"):
            await connection.subscribe(subject, cb=wake)
        await connection.publish(f"{self.namespace}.workers.foreign", json.dumps(report).encode())
        try:
            while True:
                woken.clear()
                names = [self.identifier() for _ in range(self.PLACES)]
                body = {"worker_id": "foreign", "event_ids": names}
                lost = await self.http.post("/api/commands/claim", json=body)
                answer = await self.http.post("/api/commands/claim", json=body)  # as if the first were lost
                assert answer.json()["groups"][:1] == lost.json()["groups"][:1] or not lost.json()["groups"]
                for group in answer.json()["groups"]:
                    await self.work_on(stream, group)
                if not answer.json()["groups"]:
                    await woken.wait()
        finally:
            await connection.close()
            await self.http.aclose()

    async def work_on(self, stream: Any, group: dict[str, Any]) -> None:
        self.claimed += len(group["commands"])
        contexts = [group["shared"] | command["context"] for command in group["commands"]]
        events = [self.end(group["execution_id"], context) for context in contexts]
        await stream.publish(
            f"{self.event_prefix}.{group['execution_id']}.batch",
            json.dumps({"events": events}).encode(),
            headers={"Nats-Msg-Id": f"{events[0]['event_id']}+{len(events) - 1}"},
        )


TEXT = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: "{{ range(12) | list }}", iterator: n, mode: parallel}
    tool: {kind: noop}
    next: [end]
  - step: end
    tool: {kind: python, input: {found: "{{ start.results }}"}, code: "result = found"}
"""


async def made(settings: Settings) -> bool:
    assert settings.nats_url is not None
    connection = await nats.connect(settings.nats_url)
    streams = {stream.config.name for stream in await connection.jsm().streams_info()}
    await connection.close()
    names = Names.of(settings)
    return {names.event_stream, f"{settings.nats_namespace.upper()}_COMMANDS"} <= streams


@pytest.mark.parametrize("form", [ForeignWorker, ForeignBatchWorker], ids=["one by one", "many at once"])
async def test_the_protocol_is_enough(settings: Settings, form: type[ForeignWorker]) -> None:
    async with serving(settings, event_transport=EventTransport.NATS) as service:
        engine = await Engine.open(service.settings)
        assert settings.nats_url is not None
        worker = form(
            settings.nats_url, service.url, settings.nats_namespace, settings.event_nats_subject_prefix
        )
        running = asyncio.create_task(engine.run(playbook(TEXT)))
        await until(lambda: made(settings), "the streams, which our side makes")
        working = asyncio.create_task(worker.run())
        state = await asyncio.wait_for(running, PATIENCE_SECONDS)
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        await engine.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == [n * n for n in range(12)]
    assert worker.claimed == 12
