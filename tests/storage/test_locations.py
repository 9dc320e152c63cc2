"""Stored results from outside the event loop."""

from __future__ import annotations

import asyncio
import pickle

import pyarrow as pa
import pytest

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.store import ResultStore
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
    assert list(locations.file_sizes(settings, in_bucket.physical_uri)) == [in_bucket.physical_uri]
    with pytest.raises(StorageError, match="in no tier"):
        locations.tier_of_uri("ftp://host/file", settings)


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO, StoreTier.S3, StoreTier.GCS])
async def test_arrow_reads_parquet_in_place(store: ResultStore, settings: Settings, tier: StoreTier) -> None:
    ref = await store.put(pa.table({"n": range(1000)}), **WHERE, tier=tier)
    assert locations.dataset(settings, ref.physical_uri).count_rows() == 1000
