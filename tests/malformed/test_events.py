"""Messages of workers that are no events, or events that the log must not take: over HTTP and over NATS."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import httpx
import pytest

from noetl_dagster.errors import EventRefusedError
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.events.transport.wire import EventLimits, RefusedEvent, decode_message, encode_event, message_of
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, ended, hold, meta_of, started
from tests.service.conftest import CLIENT, Service, serving
from tests.waiting import until

EXECUTION = 7_000_000_000_000_000_000
SECRET = "hunter-in-the-event"
JSON = b'{"execution_id": "7", "event_id": "8", "event_type": "command.completed", "worker_id": "w1"}'

CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "EOF"),
    "text": (b"hello", "expected value"),
    "null": (b"null", "valid dictionary"),
    "a number": (b"1", "valid dictionary"),
    "a list": (b"[]", "valid dictionary"),
    "truncated": (JSON[:40], "EOF"),
    "two events": (JSON * 2, "trailing"),
    "single quotes": (b"{'a': 1}", "key must be a string"),
    "a byte order mark": (b"\xef\xbb\xbf" + JSON, "expected value"),
    "half a surrogate": (b'{"a": "\\ud800"}', "escape"),
    "not a number": (b'{"execution_id": NaN}', "execution_id"),
    "a number of 5,000 digits": (b'{"execution_id": ' + b"9" * 5_000 + b"}", "out of range"),
    "gzip": (gzip.compress(JSON), "expected value"),
    "deep lists": (b"[" * 100_000, "recursion"),
    "deep mappings": (b'{"a":' * 100_000, "recursion"),
    "an empty mapping": (b"{}", "execution_id"),
}
"""Contents of messages, and what the refusal names."""

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"execution_id {value!r:.9}": ({"execution_id": value}, "execution_id") for value in (None, "", "x", -1, 1.5, 2**63, [], {})},
    **{f"event_id {value!r:.9}": ({"event_id": value}, "event_id") for value in (None, "", "x", -1, 1.5, 2**63, [], {})},
    **{f"event_type {value!r:.9}": ({"event_type": value}, "event_type") for value in (None, 1, [], "x" * 65)},
    **{f"event_type {value}": ({"event_type": value}, "may not emit") for value in ("", "x", "step.enter", "playbook.completed")},
    **{f"worker_id {value!r:.9}": ({"worker_id": value}, "worker_id") for value in (None, "", 1, [], "x" * 513)},
    **{f"meta {value!r:.9}": ({"meta": value}, "meta") for value in (None, 1, "x", [], {}, {"command_id": 1}, {"command_id": None})},
    **{f"payload {value!r:.9}": ({"payload": value}, "payload") for value in (None, 1, "x", [])},
    **{f"result {value!r:.9}": ({"payload": {"result": value}}, "payload.result") for value in (1, "x", [], {}, {"status": "ok", "x": 1})},
    **{f"duration {value!r}": ({"payload": {"duration": value}}, "payload.duration") for value in (-1, "x", [])},
    **{f"current_index {value!r}": ({"payload": {"current_index": value}}, "current_index") for value in (-1, 2**31, "x", 3)},
    **{f"iter_index {value!r:.9}": ({"meta": {"iter_index": value}}, "iter_index") for value in (-1, 2**31, 2**70, "x", 1.5, [1], True)},
    **{f"timestamp {value!r:.9}": ({"timestamp": value}, "timestamp") for value in ("yesterday", "2026-01-01T00:00:00", [], 1e300)},
    **{f"{name} {value!r:.9}": ({"payload": {name: value}}, f"payload.{name}")
       for name in ("catalog_id", "parent_event_id", "parent_execution_id") for value in (-1, "x", 2**63, [])},
    **{f"{name} of the wrong type": ({"payload": {name: value}}, f"payload.{name}")
       for name, value in (("context", []), ("error", ["x"]), ("node_name", 1), ("status", {}), ("node_type", []))},
    "a long step": ({"payload": {"node_name": "x" * 513}}, "payload.node_name"),
    "an end of a shard": ({"meta": {"shard_id": 1}}, "loop.shard.done"),
    "a large event": ({"meta": {"note": "x" * 1024**2}}, "NOETL_EVENT_BYTES"),
    "a large result": ({"payload": {"result": {"status": "ok", "data": "x" * 10_000}}}, "payload.result.data"),
}  # fmt: skip
"""Changes of an event that the log would take, and what the refusal names."""


def changed(changes: dict[str, Any], execution_id: int = EXECUTION) -> dict[str, Any]:
    """Returns the message of an event with changes."""
    message = message_of(ended(execution_id, 0))
    for name, value in changes.items():
        is_part = isinstance(value, dict) and bool(value) and name in ("meta", "payload")
        message[name] = message[name] | value if is_part else value
    return message


def refusal(content: bytes) -> str:
    """Returns why a message, or the only event of its batch, is refused."""
    try:
        [found] = decode_message(content, datetime.now(UTC), EventLimits())
    except EventRefusedError as error:
        return str(error)
    assert isinstance(found, RefusedEvent), found
    return found.reason


@pytest.mark.parametrize(("content", "named"), CONTENTS.values(), ids=CONTENTS)
def test_contents(content: bytes, named: str) -> None:
    reason = refusal(content)
    assert named in reason
    assert len(reason) < 300


@pytest.mark.parametrize(("changes", "named"), FIELDS.values(), ids=FIELDS)
def test_fields(changes: dict[str, Any], named: str) -> None:
    message = changed(changes)
    message["unknown"] = SECRET
    for content in (message, {"events": [message]}):
        reason = refusal(json.dumps(content).encode())
        assert named in reason
        assert len(reason) < 1_000
        assert SECRET not in reason


def test_a_malformed_event_of_a_batch_affects_no_other() -> None:
    for changes, _ in FIELDS.values():
        batch = {"events": [changed({}), changed(changes), changed({})]}
        found = decode_message(json.dumps(batch).encode(), datetime.now(UTC), EventLimits())
        assert [isinstance(one, RefusedEvent) for one in found] == [False, True, False]


# -- over HTTP ----------------------------------------------------------------------------------------

COUNTS = """
SELECT (SELECT count(*) FROM noetl.event), (SELECT count(*) FROM noetl.queue), (SELECT count(*) FROM noetl.execution),
       (SELECT count(*) FROM noetl.catalog), (SELECT count(*) FROM noetl.dead_letter),
       (SELECT count(*) FROM noetl.runtime), (SELECT max(lease_until) FROM noetl.queue)
"""

CLAIM = {"worker_id": "w1", "event_ids": ["1"]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "commands/claim": [
        *({"event_ids": ["1"]}, CLAIM | {"worker_id": ""}, CLAIM | {"worker_id": "x" * 5_000}, CLAIM | {"event_ids": []}),
        *(CLAIM | {"event_ids": ids} for ids in (["x"], [str(number) for number in range(1_001)])),
        *(CLAIM | {"limits": limits} for limits in ({"http": -1}, ["http"])),
        *(CLAIM | {"pool": "A b"}, CLAIM | {"known": {"x": "1"}}),
    ],
    "commands/release": [{"event_ids": ["1"]}, CLAIM | {"event_ids": []}, CLAIM | {"event_ids": [None]}],
    "workers": [
        {"slots": 1},
        *({"worker_id": "w1"} | one for one in ({"slots": "many"}, {"slots": -1}, {"meta": {"a": "x" * 5_000}}, {"pool": "a.>"})),
    ],
    "events/batch": [{}, {"events": {}}, {"events": [1]}, {"events": [{}] * 10_001}],
    "executions/execute": [
        {},
        *({"path": path} for path in (1, "a\0b", "../../etc/passwd", "nowhere/at-all")),
        *({"path": "a"} | one for one in ({"version": "x"}, {"workload": []}, {"priority": "high"}, {"runner": "cron"})),
    ],
    "catalog": [{}, *({"content": content} for content in (1, "hello", "a: [", "a: \0"))],
}  # fmt: skip
"""Bodies of requests by their path below ``/api``."""

ANY_BODY = [b"", b"null", b"1", b'"x"', b"[]", b"{", b"\xff", b"\0", gzip.compress(b"{}"), b"[" * 100_000]
ENCODED = [
    ({"content-encoding": "gzip"}, gzip.compress(b" " * 50_000_000 + b"{}")),
    ({"content-encoding": "br"}, b"{}"),
    ({"content-type": "application/msgpack"}, b"\x80"),
    ({"content-type": "application/json; charset=utf-16"}, "{}".encode("utf-16")),
    ({"content-type": ""}, b"{}"),
]

NO_IDS = ["x", "-1", "1.5", "9" * 19, "9" * 400, "%00", "1%00", "..%2f..", "%d9%a1", "%201", "0x1"]
READS = ["executions/{}", "executions/{}/events", "executions/{}/lifecycle", "catalog/{}", "commands/{}"]


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings, service_rate=100_000) as running:
        yield running


async def held(service: Service) -> int:
    """Returns an execution of whose commands w1 holds 0 to 9."""
    first = started()
    await service.plane.engine.runtime.log.append([first])
    await hold(service.plane.engine.runtime.pool, first.execution_id, 10)
    return first.execution_id


async def refused(service: Service, path: str, content: bytes, headers: dict[str, str] | None = None) -> str:
    """Posts a body that the API refuses, and returns the detail of its problem document."""
    answer = await service.client.post(f"/api/{path}", content=content, headers=CLIENT | (headers or {}))
    assert 400 <= answer.status_code < 500, (path, content[:80], answer.status_code, answer.text[:300])
    return problem(answer)


def problem(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document.keys() == {"status", "title", "detail"}
    assert "Traceback" not in document["detail"]
    assert SECRET not in document["detail"]
    assert len(document["detail"]) < 2_100
    return str(document["detail"])


async def test_requests(service: Service) -> None:
    execution_id, pool = await held(service), service.plane.engine.runtime.pool
    before = await pool.fetchrow(COUNTS)
    for changes, named in FIELDS.values():
        message = changed(changes, execution_id)
        detail = await refused(service, "events", json.dumps(message).encode())
        assert named in detail or "body." in detail, (changes, detail)
        good = message_of(ended(execution_id, 1))
        await refused(service, "events/batch", json.dumps({"events": [good, message]}).encode())
    for content, _ in CONTENTS.values():
        detail = await refused(service, "events", content)
        assert "body" in detail or content.endswith(JSON), detail  # a byte order mark is skipped
    for path, bodies in BODIES.items():
        for content in (*(json.dumps(body).encode() for body in bodies), *ANY_BODY):
            await refused(service, path, content)
        for headers, content in ENCODED:
            await refused(service, path, content, headers)
    for number in NO_IDS:
        for path in READS:
            answer = await service.client.get(f"/api/{path.format(number)}")
            assert 400 <= answer.status_code < 500, (path, number, answer.status_code)
            problem(answer)
        for path in ("executions/{}/cancel", "executions/{}/resume"):
            await refused(service, path.format(number), b"{}")
    assert await pool.fetchrow(COUNTS) == before


CONTEXTS: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "context.step: Field required"),
    "another step": ({"step": 1}, "context.step: "),
    "a visit of the wrong type": ({"step": "s", "visit": "x"}, "context.visit: "),
    "a reference of the wrong type": ({"step": "s", "item_ref": 1}, "context.item_ref"),
    "a fraction": ({"step": "s", "index": 2.5}, "context.index: "),
}
"""Contexts of rows of ``noetl.queue``, and what the answer names."""


async def test_rows_of_the_queue(service: Service) -> None:
    execution_id, pool = await held(service), service.plane.engine.runtime.pool
    command_id = meta_of(execution_id, 0)["command_id"]
    for context, named in CONTEXTS.values():
        await pool.execute("UPDATE noetl.queue SET context = $2 WHERE command_id = $1", command_id, context)
        answer = await service.client.get(f"/api/commands/{command_id}")
        assert answer.status_code == 409, answer.text
        detail = problem(answer)
        assert f"command {command_id} in noetl.queue" in detail
        assert named in detail
        assert f"cancel execution {execution_id}" in detail


# -- over NATS ----------------------------------------------------------------------------------------


async def test_the_ingestor_outlives_every_message(settings: Settings, pool: asyncpg.Pool) -> None:
    log = EventLog(pool, IDS)
    first = started()
    await log.append([first])
    await hold(pool, first.execution_id, 10)
    client = await connect(settings, "test")
    ingestor = Ingestor(client, EventHandler(log, 30), redelivery=(0.05,))
    await ingestor.open()
    subject = client.names.event_subject("default", "w1", first.execution_id, "command.completed")
    stream = client.jetstream()
    sent = 0
    unreadable = [content for content, _ in CONTENTS.values() if content]
    fields = [json.dumps(changed(one, first.execution_id)).encode() for one, _ in FIELDS.values()]
    poison = [
        changed({"meta": meta_of(first.execution_id, 2) | {"note": "\ud800"}}, first.execution_id),
        changed({"meta": meta_of(first.execution_id, 2) | {"note": 2**70}}, first.execution_id),
        changed({"meta": meta_of(first.execution_id, 2) | {"command_id": "x\0"}}, first.execution_id),
        changed({"meta": meta_of(first.execution_id, 2) | {"command_id": "x" * 100_000}}, first.execution_id),
        changed({"event_type": "command.failed", "meta": {"watermark": [1]}}, first.execution_id),
        changed({}, 1),
    ]
    for content in [*unreadable, *fields, *(json.dumps(one).encode() for one in poison)]:
        if len(content) < 60_000:  # NATS takes no larger ones
            await stream.publish(subject, content)
            sent += 1
    good = ended(first.execution_id, 5)
    await stream.publish(subject, encode_event(good))

    async def empty() -> bool:
        await ingestor.drain(quiet_seconds=0.1)
        return (await stream.stream_info(client.names.event_stream)).state.messages == 0

    await until(empty, "an empty stream")
    await ingestor.close()
    await client.close()
    rows = await pool.fetch("SELECT event_id FROM noetl.event WHERE event_id <> $1", first.event_id)
    assert [row["event_id"] for row in rows] == [good.event_id]
    letters = await pool.fetch("SELECT error FROM noetl.dead_letter")
    assert len(letters) + ingestor.total.refused == sent
    assert all(row["error"] for row in letters)
