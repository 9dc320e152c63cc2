"""A worker that uses none of our code: a NATS client, an HTTP client and docs/reference/worker-protocol.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import httpx
import nats
import pytest
from pydantic import SecretStr

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.nats import NatsNames
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.service.conftest import serving
from tests.waiting import PATIENCE_SECONDS, until


class ForeignWorker:
    """Runs steps whose tool is ``noop``: it returns the square of the item.

    Args:
        slots: commands at once.
    """

    def __init__(self, nats_url: str, server_url: str, namespace: str, event_prefix: str, slots: int) -> None:
        self.nats_url, self.namespace, self.event_prefix, self.slots = (
            nats_url,
            namespace,
            event_prefix,
            slots,
        )
        self.http = httpx.AsyncClient(base_url=server_url, headers={"authorization": "Bearer its-own"})
        self.sequence = itertools.count()
        self.node = 0
        self.claimed = 0

    def identifier(self) -> str:
        milliseconds = time.time_ns() // 1_000_000 - 1_704_067_200_000
        return str(milliseconds << 22 | self.node << 12 | next(self.sequence) % 4096)

    async def run(self) -> None:
        report = {"worker_id": "foreign", "slots": self.slots, "available_slots": self.slots}
        self.node = (await self.http.post("/api/workers", json=report)).json()["node"]
        connection = await nats.connect(self.nats_url)
        stream, announced = connection.jetstream(), asyncio.Event()

        async def note(message: Any) -> None:
            announced.set()

        for subject in (f"{self.namespace}.commands", f"{self.namespace}.commands.pool.default.foreign"):
            await connection.subscribe(subject, cb=note)
        await connection.publish(f"{self.namespace}.workers.default.foreign", json.dumps(report).encode())
        try:
            while True:
                announced.clear()
                names = [self.identifier() for _ in range(self.slots)]
                body = {"worker_id": "foreign", "event_ids": names}
                lost = await self.http.post("/api/commands/claim", json=body)
                answer = await self.http.post("/api/commands/claim", json=body)  # as if the first were lost
                assert answer.json()["groups"][:1] == lost.json()["groups"][:1] or not lost.json()["groups"]
                for group in answer.json()["groups"]:
                    await self.work_on(stream, group)
                if not answer.json()["groups"]:
                    await announced.wait()
        finally:
            await connection.close()
            await self.http.aclose()

    async def work_on(self, stream: Any, group: dict[str, Any]) -> None:
        self.claimed += len(group["commands"])
        events = [
            self.end(group["execution_id"], group["shared"] | command["context"], command["claim_event_id"])
            for command in group["commands"]
        ]
        subject, name, content = "batch", f"{events[0]['event_id']}+{len(events) - 1}", {"events": events}
        if len(events) == 1:
            subject, name, content = "command.completed", events[0]["event_id"], events[0]
        await stream.publish(
            f"{self.event_prefix}.default.foreign.{group['execution_id']}.{subject}",
            json.dumps(content).encode(),
            headers={"Nats-Msg-Id": name},
        )

    def end(self, execution_id: str, context: dict[str, Any], claim: str) -> dict[str, Any]:
        return {
            "execution_id": execution_id,
            "event_id": self.identifier(),
            "event_type": "command.completed",
            "payload": {
                "node_name": context["step"],
                "status": "COMPLETED",
                "current_index": context["index"],
                "parent_event_id": claim,
                "result": {"status": "ok", "data": context["item"] ** 2},
            },
            "meta": context["meta"],
            "worker_id": "foreign",
        }


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
    return NatsNames(settings).event_stream in streams


@pytest.mark.parametrize("slots", [1, 5])
async def test_the_protocol_is_enough(settings: Settings, slots: int) -> None:
    tokens = SecretStr('{"its-own": ["worker:foreign"]}')
    async with serving(settings, event_transport=EventTransport.NATS, service_tokens=tokens) as service:
        engine = await Engine.open(service.settings)
        assert settings.nats_url is not None
        worker = ForeignWorker(
            settings.nats_url, service.url, settings.nats_namespace, NatsNames(settings).event_prefix, slots
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
