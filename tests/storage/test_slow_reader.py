"""A consumer that takes longer over a stream than one request may last."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

import pytest

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers import objects

MB = 1024 * 1024


@pytest.mark.slow
async def test_a_slow_reader_gets_the_whole_stream(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(64 * MB)
    async with ResultStore(settings, None) as store:
        ref = await store.put(data, execution_id=7, step="load", name="rows", tier=StoreTier.MINIO)
    monkeypatch.setattr(objects, "REQUEST_TIMEOUT", timedelta(seconds=4))
    monkeypatch.setattr(objects, "RETRY_TIMEOUT", timedelta(seconds=1))
    objects._client.cache_clear()
    try:
        async with ResultStore(settings, None) as store:
            read = bytearray()
            async for chunk in store.stream(ref):
                read += chunk
                await asyncio.sleep(0.8)
    finally:
        objects._client.cache_clear()
    assert read == data
