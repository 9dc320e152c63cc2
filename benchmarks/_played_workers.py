"""Workers of the pool, many in one process, that speak the real protocol and whose tools only sleep.

Each has what a worker process has towards the control plane: a NATS connection with its subscriptions, the real HTTP
client, its node and its identifiers, slots, capacity reports at the real times, claims by the rules of
:class:`noetl_dagster.pool_worker.claimer.Claimer` for commands of 50 ms and more, ends that share messages and that
their slots wait for. What a worker process has beside that is not played: its PostgreSQL connections, the playbook and
its tools, results that are stored, heartbeats of commands that run for 15 s, an address of its own. All of them share
one process, one event loop and one connection that listens for ends, which only the measurement needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import nats.errors
import orjson
from nats.aio.client import Client as NatsClient

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.transport.handler import ENDS_CHANNEL
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.nats import EVENT_BYTES, NatsNames, connect
from noetl_dagster.events.transport.nats_transport import HEADER_BYTES, MESSAGE_ID
from noetl_dagster.pool_worker.worker import CHANGE_SECONDS, LINGER_SECONDS
from noetl_dagster.settings import DEFAULT_POOL, Settings

CONNECT_AT_ONCE = 20
AGAIN_SECONDS = 1.0


class Fleet:
    """So many workers, and what was seen of them: all counts are of the time since :meth:`begin`.

    Attributes:
        requests: claims by how many commands they were given.
        asked: seconds that claims took.
        logged: seconds from the end of each tool to the notice that its end is in the log.
        lost: requests that failed.
    """

    def __init__(self, settings: Settings, workers: int, slots: int, sleep: float, jitter: float) -> None:
        self.settings = settings
        self.names = NatsNames(settings)
        self.slots = slots
        self._sleep = sleep
        self._jitter = jitter
        self._ended: dict[str, float] = {}
        self._workers = [PlayedWorker(self, f"played-{number}") for number in range(workers)]
        self._listener: Any = None
        self.begin()

    def begin(self) -> None:
        """Counts anew."""
        self.requests: Counter[int] = Counter()
        self.asked: list[float] = []
        self.logged: list[float] = []
        self.lost: Counter[str] = Counter()
        self.reports = 0
        self.messages = 0

    async def open(self) -> None:
        self._listener = await asyncpg.connect(self.settings.db_url)
        await self._listener.add_listener(ENDS_CHANNEL, self._notified)
        some = asyncio.Semaphore(CONNECT_AT_ONCE)

        async def begin(worker: PlayedWorker) -> None:
            async with some:
                await worker.open()

        await asyncio.gather(*map(begin, self._workers))

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))
        await self._listener.close()

    def duration(self) -> float:
        """How long a tool sleeps."""
        return self._sleep * random.uniform(1 - self._jitter, 1 + self._jitter)

    def tool_ended(self, command_id: str) -> None:
        self._ended[command_id] = time.monotonic()

    def _notified(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        now = time.monotonic()
        for name in orjson.loads(payload):
            at = self._ended.pop(name, None)
            if at is not None:
                self.logged.append(now - at)


class PlayedWorker:
    """One worker."""

    def __init__(self, fleet: Fleet, worker_id: str) -> None:
        self._fleet = fleet
        self._id = worker_id
        self._free = fleet.slots
        self._known: dict[str, str] = {}
        self._playbooks: set[str] = set()
        self._ends: dict[str, list[bytes]] = {}
        self._wanted, self._freed, self._changed, self._due = (asyncio.Event() for _ in range(4))
        self._tasks: list[asyncio.Task[Any]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        fleet, names = self._fleet, self._fleet.names
        self._http = ApiClient(fleet.settings)
        answer = await self._post("/api/workers", self._report())
        self._ids = Snowflake(answer["node"])
        self._client: NatsClient = await connect(fleet.settings, f"worker {self._id}")
        self._stream = self._client.jetstream(publish_async_max_pending=4_000)
        for subject in (names.commands, names.targeted(DEFAULT_POOL, self._id)):
            await self._client.subscribe(subject, cb=self._woken)
        await self._client.subscribe(f"{names.capacity}.report.now", cb=self._asked)
        self._wanted.set()
        works = (self._claim, self._send, self._keep_reporting)
        self._tasks = [asyncio.create_task(work()) for work in works]

    async def close(self) -> None:
        left: set[asyncio.Task[Any]] = {*self._tasks, *self._running}
        while left:  # a wait of nats-py may swallow a cancellation
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=1)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.publish(
                self._fleet.names.capacity_of(DEFAULT_POOL, self._id),
                orjson.dumps(self._report() | {"status": "stopped"}),
            )
            await self._client.flush(timeout=5)
        await self._client.close()
        await self._http.close()

    def _report(self) -> dict[str, Any]:
        slots = self._fleet.slots
        return {
            "worker_id": self._id,
            "status": "ready",
            "slots": slots,
            "available_slots": self._free,
            "active_tasks": slots - self._free,
            "interval": self._fleet.settings.worker_heartbeat_seconds,
            "meta": {"host": "played", "transport": "nats"},
        }

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.request("POST", path, content=orjson.dumps(body))
        return orjson.loads(answer.checked().content)

    async def _claim(self) -> None:
        fleet, asked = self._fleet, []
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fleet.settings.worker_heartbeat_seconds):
                    await self._wanted.wait()
            if not self._free:
                self._freed.clear()
                await self._freed.wait()
                continue
            self._wanted.clear()
            asked = asked or [str(one) for one in self._ids.take(self._free)]
            began = time.monotonic()
            try:
                body = {"worker_id": self._id, "event_ids": asked, "limits": {}, "known": self._known}
                answer = await self._post("/api/commands/claim", body)
                fleet.asked.append(time.monotonic() - began)
                await self._take(answer, len(asked))
                asked = []
            except ServiceError as error:
                fleet.lost[repr(error)[:150]] += 1
                self._wanted.set()
                await asyncio.sleep(AGAIN_SECONDS)

    async def _take(self, answer: dict[str, Any], places: int) -> None:
        for events in answer["states"].values():
            catalog_id = events[0]["payload"]["catalog_id"]
            if catalog_id not in self._playbooks:
                self._playbooks.add(catalog_id)
                await self._http.request("GET", f"/api/catalog/{catalog_id}")
        count = 0
        for group in answer["groups"]:
            self._known[group["execution_id"]] = group["state_version"]
            for command in group["commands"]:
                count += 1
                self._free -= 1
                running = asyncio.create_task(self._run(group["execution_id"], group["shared"], command))
                self._running.add(running)
                running.add_done_callback(self._running.discard)
        while len(self._known) > 16:
            del self._known[next(iter(self._known))]
        self._fleet.requests[count] += 1
        if count:
            self._changed.set()
        if count == places:
            self._wanted.set()

    async def _run(self, execution_id: str, shared: dict[str, Any], command: dict[str, Any]) -> None:
        context = shared | command["context"]
        seconds = self._fleet.duration()
        await asyncio.sleep(seconds)
        self._fleet.tool_ended(command["command_id"])
        payload = {
            "node_name": context["step"],
            "status": "COMPLETED",
            "duration": seconds,
            "catalog_id": context.get("catalog_id"),
            "parent_event_id": command["claim_event_id"],
            "result": {"status": "ok", "data": context.get("item")},
            "current_index": context["index"],
        }
        event = {
            "execution_id": execution_id,
            "event_id": str(self._ids.next()),
            "event_type": "loop.shard.done" if context.get("shard") else "command.completed",
            "payload": payload,
            "meta": context["meta"],
            "worker_id": self._id,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        self._ends.setdefault(execution_id, []).append(orjson.dumps(event))
        self._due.set()

    async def _send(self) -> None:
        """Ends into messages, those of one execution together; their slots are free when they are confirmed."""
        while True:
            await self._due.wait()
            await asyncio.sleep(LINGER_SECONDS)
            self._due.clear()
            taken, self._ends = self._ends, {}
            for execution_id, events in taken.items():
                for message in _messages(events):
                    await self._publish(execution_id, message)

    async def _publish(self, execution_id: str, events: Sequence[bytes]) -> None:
        first = orjson.loads(events[0])
        name, kind, content = first["event_id"], first["event_type"], events[0]
        if len(events) > 1:
            name, kind = f"{name}+{len(events) - 1}", "batch"
            content = b'{"events":[' + b",".join(events) + b"]}"
        subject = self._fleet.names.event_subject(DEFAULT_POOL, self._id, int(execution_id), kind)
        while True:
            try:
                await self._stream.publish(subject, content, timeout=5, headers={MESSAGE_ID: name})
                break
            except (nats.errors.Error, OSError) as error:
                self._fleet.lost[repr(error)[:150]] += 1
        self._fleet.messages += 1
        self._free += len(events)
        self._freed.set()
        self._changed.set()

    async def _woken(self, message: Any) -> None:
        self._wanted.set()
        if message.subject != self._fleet.names.commands and not self._free:
            await self._client.publish(self._fleet.names.commands, message.data)

    async def _asked(self, message: Any) -> None:
        await self._send_report()

    async def _send_report(self) -> None:
        self._fleet.reports += 1
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.publish(
                self._fleet.names.capacity_of(DEFAULT_POOL, self._id), orjson.dumps(self._report())
            )

    async def _keep_reporting(self) -> None:
        interval = self._fleet.settings.worker_heartbeat_seconds
        await asyncio.sleep(random.random())
        sent, reported = 0.0, -1
        while True:
            if self._free != reported or time.monotonic() >= sent + interval:
                sent, reported = time.monotonic(), self._free
                await self._send_report()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(sent + interval - time.monotonic(), 0)):
                    await self._changed.wait()
                    await asyncio.sleep(CHANGE_SECONDS)


def _messages(events: list[bytes]) -> list[list[bytes]]:
    """The events in as few messages as the stream's limit lets them."""
    messages: list[list[bytes]] = []
    size = EVENT_BYTES
    for event in events:
        size += len(event) + 1
        if size + HEADER_BYTES > EVENT_BYTES:
            messages.append([])
            size = len(event) + 1
        messages[-1].append(event)
    return messages
