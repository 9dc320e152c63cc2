"""The nats tool against a real server."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox


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
    assert await nats("kv_keys") == {"keys": ["a", "b"], "count": 2}
    assert (await nats("kv_delete", key="a"))["deleted"] is True
    assert (await nats("kv_delete", key="a"))["deleted"] is False
    assert (await nats("kv_keys"))["keys"] == ["b"]


async def test_publish_plain_and_confirmed(run: Any, box: Toolbox, bucket: str) -> None:
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


async def test_mistakes(run: Any, box: Toolbox) -> None:
    with pytest.raises(ToolError, match="known: kv_get"):
        await run("nats", operation="kv_fetch")
    with pytest.raises(ToolError, match="needs 'key'"):
        await run("nats", operation="kv_get", bucket="x")
    with pytest.raises(ToolError, match="cannot be reached") as caught:
        await run(
            "nats",
            operation="kv_get",
            bucket="x",
            key="y",
            auth={"type": "nats", "url": "nats://127.0.0.1:1"},
        )
    assert caught.value.retryable
