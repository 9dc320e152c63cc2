"""Results made of parts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import NewResult, ResultStore


async def parts_of(store: ResultStore, values: list[object]) -> list[ResultRef]:
    return await store.put_many([NewResult(value, 9, "loop", f"part-{n}") for n, value in enumerate(values)])


@pytest.mark.parametrize(
    ("strategy", "values", "whole", "items"),
    [
        (Strategy.APPEND, [[1], {"a": 2}, 3], [[1], {"a": 2}, 3], [[1], {"a": 2}, 3]),
        (Strategy.CONCAT, [[1, 2], [], [3]], [1, 2, 3], [1, 2, 3]),
        (Strategy.MERGE, [{"a": 1, "b": 1}, {"b": 2}], {"a": 1, "b": 2}, [{"a": 1, "b": 2}]),
        (Strategy.REPLACE, [1, 2, 3], 3, [3]),
    ],
)
async def test_strategies(
    store: ResultStore, strategy: Strategy, values: list[object], whole: object, items: list[object]
) -> None:
    ref = await store.manifest(9, "loop", "result", await parts_of(store, values), strategy)
    assert ref.kind is RefKind.MANIFEST
    assert await store.get(ref.ref) == whole
    assert [item async for item in store.items(ref.ref)] == items
    assert await store.find(ref.ref) == ref


async def test_parts_come_page_by_page_in_order(store: ResultStore) -> None:
    parts = await parts_of(store, list(range(1203)))

    async def given() -> AsyncIterator[ResultRef]:
        for part in parts:
            yield part

    ref = await store.manifest(9, "loop", "result", given())
    assert ref.rows == 1203
    assert [part.ref_id async for part in store.parts(ref)] == [part.ref_id for part in parts]


async def test_a_lost_part_is_named(store: ResultStore) -> None:
    parts = await parts_of(store, [1, 2, 3])
    ref = await store.manifest(9, "loop", "result", parts)
    await store.delete(parts[1])
    with pytest.raises(ReferenceNotAvailableError, match="part 1 of manifest"):
        await store.get(ref)


async def test_tables_stay_tables(store: ResultStore) -> None:
    parts = await parts_of(store, [pd.DataFrame({"n": [1, 2]}), pa.table({"n": [3]})])
    ref = await store.manifest(9, "loop", "result", parts, "concat")
    assert ref.rows == 3
    assert (await store.get(ref)).to_pydict() == {"n": [1, 2, 3]}
    assert [row async for row in store.items(ref)] == [{"n": 1}, {"n": 2}, {"n": 3}]


async def test_merge_wants_mappings(store: ResultStore) -> None:
    ref = await store.manifest(9, "loop", "result", await parts_of(store, [[1]]), "merge")
    with pytest.raises(StorageError, match="joins mappings"):
        await store.get(ref)


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO])
async def test_a_dataset_written_in_place_is_registered(
    store: ResultStore, settings: Settings, tier: StoreTier
) -> None:
    uri = store.dataset_uri(execution_id=9, step="spark", name="rows", tier=tier)
    await store.put(1, execution_id=9, step="spark", name="bucket", tier=tier)  # makes the bucket
    filesystem, _ = locations.arrow_filesystem(settings, uri)
    for part in range(2):
        path = locations.arrow_filesystem_path(settings, f"{uri}part-{part}.parquet")
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        pq.write_table(pa.table({"n": [part * 10, part * 10 + 1]}), path, filesystem=filesystem)
    ref = await store.register_dataset(
        uri, execution_id=9, step="spark", name="rows", rows=4, schema={"n": "bigint"}
    )
    assert ref.kind is RefKind.DATASET
    assert ref.store_tier is tier
    assert ref.extra["columns"] == {"n": "bigint"}
    table = await store.get(ref.ref)
    assert sorted(table.column("n").to_pylist()) == [0, 1, 10, 11]
    assert len([row async for row in store.items(ref)]) == 4
    assert len(locations.list_files(settings, ref.physical_uri, ".parquet")) == 2
    await store.delete(ref)
    assert locations.list_files(settings, uri) == [] if tier is StoreTier.MINIO else True
    with pytest.raises(ReferenceNotAvailableError):
        await store.get(ref)
