"""The nats tool against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

from noetl_dagster.errors import ToolError
from noetl_dagster.process import jetstream
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.nats import tool
from tests.tools.chunk_log import Killed, ListLog
from tests.waiting import until

pytestmark = pytest.mark.long

MESSAGES = 120


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    import uuid

    return f"tools-{uuid.uuid4().hex[:8]}"


async def test_key_value(run: Any, bucket: str) -> None:
    async def nats(operation: str, **fields: Any) -> Any:
        return (await run("nats", operation=operation, bucket=bucket, **fields)).data

    assert (await nats("kv_get", key="a"))["found"] is False
    assert (await nats("kv_put", key="a", value={"n": 1}))["revision"] == 1
    await nats("kv_put", key="b", value="text")
    assert await nats("kv_get", key="a") == {"key": "a", "value": {"n": 1}, "revision": 1, "found": True}
    assert (await nats("kv_get", key="b"))["value"] == "text"
    await nats("kv_put", key="b", value='{"n": 1234567890123456.7891}')
    assert (await nats("kv_get", key="b", numbers="text"))["value"] == {"n": "1234567890123456.7891"}
    with pytest.raises(ToolError, match=r"nats in step stage: value\.n is 1234567890123456\.7891"):
        await nats("kv_get", key="b")
    assert await nats("kv_keys") == {"keys": ["a", "b"], "count": 2}
    assert (await nats("kv_delete", key="a"))["deleted"] is True
    assert (await nats("kv_delete", key="a"))["deleted"] is False
    assert (await nats("kv_keys"))["keys"] == ["b"]


async def test_keys_come_in_pages(run: Any, box: ToolContext, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those that were deleted, and those that are removed while the keys are read."""
    monkeypatch.setattr(jetstream, "KEYS_AT_ONCE", 2)
    monkeypatch.setattr(jetstream, "ANSWER_SECONDS", 0.5)
    context = (await box.clients.nats()).jetstream()
    values = await context.create_key_value(bucket=bucket)
    for key in "abcdefg":
        await values.put(key, b"1")
    await values.delete("b")
    listed = await run("nats", operation="kv_keys", bucket=bucket)
    assert listed.data == {"keys": ["a", "c", "d", "e", "f", "g"], "count": 6}

    pages = []
    async for page in jetstream.pages_of_keys(context, bucket):
        pages.append(page)
        if len(pages) == 1:
            await context.purge_stream(f"KV_{bucket}")
    assert pages == [["a", "c"]]


async def test_publish_plain_and_confirmed(run: Any, box: ToolContext, bucket: str) -> None:
    client = await box.clients.nats()
    inbox = await client.subscribe(f"{bucket}.plain")

    await run("nats", operation="publish", subject=f"{bucket}.plain", value={"a": 1}, headers={"k": "v"})
    message = await inbox.next_msg(timeout=60)
    stream = client.jetstream()
    await stream.add_stream(name=bucket, subjects=[f"{bucket}.kept"])
    confirmed = (await run("nats", operation="publish", subject=f"{bucket}.kept", value="x", ack=True)).data
    await stream.delete_stream(bucket)

    assert message.data == b'{"a":1}'
    assert message.headers == {"k": "v"}
    assert (confirmed["stream"], confirmed["sequence"]) == (bucket, 1)


async def test_objects(run: Any, bucket: str) -> None:
    put = (await run("nats", operation="object_put", bucket=bucket, key="big", value="x" * 300_000)).data
    got = (await run("nats", operation="object_get", bucket=bucket, key="big")).data

    assert put["size"] == got["size"] == 300_000
    assert got["value"] == "x" * 300_000
    with pytest.raises(ToolError) as caught:
        await run("nats", operation="object_get", bucket=bucket, key="missing")
    assert caught.value.code == "NOT_FOUND"
    assert not caught.value.retryable


async def test_mistakes(run: Any) -> None:
    with pytest.raises(ToolError, match="known: kv_get"):
        await run("nats", operation="kv_fetch")
    with pytest.raises(ToolError, match="needs 'key'"):
        await run("nats", operation="kv_get", bucket="x")


@pytest.fixture
async def stream(box: ToolContext, bucket: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A stream with messages ``{bucket}.a`` and ``{bucket}.b`` in turn, which are read in batches of 50."""
    monkeypatch.setattr(tool, "BATCH", 50)
    context = (await box.clients.nats()).jetstream()
    await context.add_stream(name=bucket, subjects=[f"{bucket}.*"])
    for n in range(MESSAGES):
        await context.publish(f"{bucket}.{'ab'[n % 2]}", str(n).encode())
    yield bucket
    await context.delete_stream(bucket)


async def test_messages_come_until_there_are_none(run: Any, stream: str) -> None:
    every = (await run("nats", operation="subscribe", stream=stream, timeout=0.3)).data
    some = await run("nats", operation="subscribe", subject=f"{stream}.b", start=11, max_messages=3)

    assert [row["value"] for row in every] == list(range(MESSAGES))
    assert [(row["subject"], row["sequence"], row["value"]) for row in some.data] == [
        (f"{stream}.b", 12, 11),
        (f"{stream}.b", 14, 13),
        (f"{stream}.b", 16, 15),
    ]
    assert (await run("nats", operation="subscribe", stream=stream, start=5000, timeout=0.1)).data == []


@pytest.mark.parametrize(
    ("durable", "stops"), [(None, "stops_after"), ("keeper", "stops_after"), ("keeper", "stops_with")]
)
async def test_a_subscription_goes_on_where_it_stopped(
    run: Any, box: ToolContext, stream: str, durable: str | None, stops: str
) -> None:
    given = {"operation": "subscribe", "stream": stream, "timeout": 0.3, "durable": durable}
    context = (await box.clients.nats()).jetstream()
    if durable is not None:
        config = ConsumerConfig(durable_name=durable, ack_policy="explicit", ack_wait=1)
        await context.add_consumer(stream, config)
    log = box.chunks = ListLog(wanted=True)
    setattr(log, stops, 1)
    with pytest.raises(Killed):
        await run("nats", **given)
    told = [row["value"] for rows in await log.rows(box) for row in rows]
    assert told == list(range(len(told)))
    assert 0 < len(told) < MESSAGES
    setattr(log, stops, None)
    if durable is not None:
        await asyncio.sleep(1.3)  # until messages that were not acknowledged come again

    await run("nats", **given)

    values = [row["value"] for rows in await log.rows(box) for row in rows]
    assert sorted(values) == list(range(MESSAGES))
    if durable is not None:
        pending = (await context.consumer_info(stream, durable)).num_ack_pending
        assert pending == 0
        assert (await run("nats", **given | {"max_messages": 5})).ref  # nothing new: what the log says is all


async def test_no_message_is_acknowledged_before_it_is_in_the_log(run: Any, box: ToolContext, stream: str) -> None:
    context = (await box.clients.nats()).jetstream()
    log = box.chunks = ListLog(wanted=True, room=0)
    running = asyncio.ensure_future(run("nats", operation="subscribe", stream=stream, durable="d", timeout=0.3))
    await until(lambda: len(log.chunks) == 1)  # written, and nobody has room for the next
    before = await context.consumer_info(stream, "d")
    await log.make_room(None)
    await running
    after = await context.consumer_info(stream, "d")

    assert (before.ack_floor.stream_seq, after.ack_floor.stream_seq) == (0, MESSAGES)
    log.chunks.clear()
    assert (await run("nats", operation="subscribe", stream=stream, durable="d", timeout=0.2)).data == []


async def test_a_subscription_says_what_it_needs(run: Any, box: ToolContext, stream: str) -> None:
    context = (await box.clients.nats()).jetstream()
    await context.add_consumer(stream, ConsumerConfig(durable_name="one", ack_policy="explicit", max_ack_pending=1))

    for given, message in [
        ({}, "needs 'stream' or 'subject'"),
        ({"stream": stream, "max_messages": "few"}, "max_messages 'few' is no number"),
        ({"stream": stream, "durable": "one"}, "max_ack_pending 1"),
    ]:
        with pytest.raises(ToolError, match=message):
            await run("nats", operation="subscribe", **given)
    with pytest.raises(ToolError) as caught:
        await run("nats", operation="subscribe", stream="no-such")
    assert caught.value.code == "NOT_FOUND"
