"""The s3 tier, as the AWS environment configures it, against the embedded object store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import asyncpg
import pyarrow as pa
import pytest

from noetl_dagster.errors import IntegrityError, StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.store import ResultStore

MB = 1024 * 1024
WHERE = {"execution_id": 8, "step": "load", "name": "rows", "tier": StoreTier.S3}


@pytest.fixture
async def aws(settings: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with an S3 bucket and no minio endpoint; the address comes from the AWS environment."""
    async with ResultStore(settings, pool) as store:  # the minio tier makes buckets, the s3 tier does not
        await store.put(1, execution_id=8, step="makes", name="bucket", tier=StoreTier.MINIO)
    monkeypatch.setenv("AWS_ENDPOINT_URL", settings.minio_endpoint or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", settings.minio_access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.minio_secret_key.get_secret_value())
    monkeypatch.setenv("AWS_REGION", settings.minio_region)
    return settings.model_copy(
        update={"s3_bucket": settings.minio_bucket, "minio_endpoint": None, "minio_bucket": "another"}
    )


async def test_values_streams_and_tables(aws: Settings, pool: asyncpg.Pool) -> None:
    blob = os.urandom(20 * MB)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(blob), 3 * MB):
            yield blob[start : start + 3 * MB]

    async with ResultStore(aws, pool) as store:
        value = await store.put({"a": 1}, **WHERE)
        assert value.store_tier is StoreTier.S3
        assert value.physical_uri.startswith(f"s3://{aws.s3_bucket}/exec/8/load/rows-")
        assert await store.get(value.ref) == {"a": 1}
        assert await asyncio.to_thread(locations.read_bytes, aws, value.physical_uri) == b'{"a":1}'

        streamed = await store.put_stream(chunks(), **WHERE)
        assert streamed.bytes_size == len(blob)
        assert await store.get(streamed.ref) == blob
        with pytest.raises(IntegrityError):
            await store.get(streamed.model_copy(update={"sha256": "0" * 64}))

        table = await store.put(pa.table({"n": range(1000)}), **WHERE)
        assert await asyncio.to_thread(count_in_place, aws, table.physical_uri) == 1000
        await store.delete(value)
        assert not await store._placement.tier(StoreTier.S3).exists(value.physical_uri)


def count_in_place(settings: Settings, uri: str) -> int:
    return locations.dataset(settings, uri).count_rows()


async def test_wrong_credentials_name_key_bucket_and_credential(
    aws: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    recorded = await pool.fetchval("SELECT count(*) FROM noetl.result_ref")
    async with ResultStore(aws, pool) as store:
        with pytest.raises(StorageError) as caught:
            await store.put(1, **WHERE)
    message = str(caught.value)
    assert f"s3 tier: cannot write s3://{aws.s3_bucket}/exec/8/load/rows-" in message
    assert "with access key AKIAWRONG: access denied (InvalidAccessKeyId)" in message
    assert "not-the-secret" not in message
    assert await pool.fetchval("SELECT count(*) FROM noetl.result_ref") == recorded


async def test_a_tier_without_a_bucket_names_the_setting(settings: Settings, pool: asyncpg.Pool) -> None:
    async with ResultStore(settings, pool) as store:
        with pytest.raises(StorageError, match="set NOETL_S3_BUCKET"):
            await store.put(1, **WHERE)
