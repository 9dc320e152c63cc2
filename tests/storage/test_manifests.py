"""Results made of parts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.result_ref import RefKind, ResultRef, RowsAround
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import NewResult, ResultStore


async def parts_of(store: ResultStore, values: list[object]) -> list[ResultRef]:
    return await store.put_many([NewResult(value, 9, "loop", f"part-{n}") for n, value in enumerate(values)])


async def streamed(store: ResultStore, ref: ResultRef) -> bytes:
    return b"".join([bytes(data) async for data in store.stream(ref)])


STRATEGIES: list[tuple[Strategy, list[object], object, list[object]]] = [
    (Strategy.APPEND, [[1], {"a": 2}, "é"], [[1], {"a": 2}, "é"], [[1], {"a": 2}, "é"]),
    (Strategy.APPEND, [], [], []),
    (Strategy.CONCAT, [[1, 2], [], [{"a": None}]], [1, 2, {"a": None}], [1, 2, {"a": None}]),
    (Strategy.CONCAT, [[], []], [], []),
    (Strategy.CONCAT, [], [], []),
]


async def test_strategies(store: ResultStore) -> None:
    for strategy, values, whole, items in STRATEGIES:
        ref = await store.manifest(9, "loop", "result", await parts_of(store, values), strategy)
        assert ref.kind is RefKind.MANIFEST
        assert await store.get(ref.ref) == whole, strategy
        assert [item async for item in store.items(ref.ref)] == items, strategy
        assert await store.find(ref.ref) == ref
        data = await streamed(store, ref)
        assert orjson.loads(data) == whole, strategy
        assert await store.get_bytes(ref) == data
        assert await store.content_type(ref) == codec.JSON


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
    ref = await store.register_dataset(uri, execution_id=9, step="spark", name="rows", rows=4, schema={"n": "bigint"})
    assert ref.kind is RefKind.DATASET
    assert ref.store_tier is tier
    assert ref.extra["columns"] == {"n": "bigint"}
    table = await store.get(ref.ref)
    assert sorted(table.column("n").to_pylist()) == [0, 1, 10, 11]
    assert len([row async for row in store.items(ref)]) == 4
    assert len(locations.file_sizes(settings, ref.physical_uri, ".parquet")) == 2
    with pytest.raises(StorageError, match="is a dataset, not one object"):
        await store.get_bytes(ref.model_copy(update={"bytes_size": 1 << 50}))  # more than the memory
    await store.delete(ref)
    assert locations.file_sizes(settings, uri) == {} if tier is StoreTier.MINIO else True
    with pytest.raises(ReferenceNotAvailableError):
        await store.get(ref)


async def test_the_bytes_of_rows_beside_fields_are_those_of_the_mapping(store: ResultStore) -> None:
    rows = [{"id": n, "text": 'a "b"\n'} for n in range(3000)]
    lines = [JsonLines(codec.json_lines(some), len(some)) for some in (rows[:2500], rows[2500:])]
    large = await store.put("large", execution_id=9, step="sql", name="large")
    fields = {"row_count": 3000, "command_1": {"row_count": 3000}}
    around = RowsAround(fields=fields, at=("rows", "command_1.rows"), stored={"note": large})
    ref = await store.manifest(9, "sql", "result", await parts_of(store, lines), around=around)
    loop = await store.manifest(9, "loop", "result", [ref, large])

    value = fields | {"note": "large", "rows": rows, "command_1": {"row_count": 3000, "rows": rows}}
    assert orjson.loads(await streamed(store, ref)) == value
    assert orjson.loads(await streamed(store, ref.rows_alone)) == rows
    assert orjson.loads(await streamed(store, loop)) == [value, "large"]


async def test_the_bytes_of_tables_are_one_of_parquet(store: ResultStore) -> None:
    tables = [pa.table({"a": pa.nulls(2)}), pa.table({"a": [3]}), pa.table({"a": [4], "b": ["x"]})]
    ref = await store.manifest(9, "sql", "result", await parts_of(store, tables), Strategy.CONCAT)
    mixed = await parts_of(store, [tables[1], [{"a": 5}]])
    rows = await store.manifest(9, "sql", "rows", mixed, Strategy.CONCAT)

    assert await store.content_type(ref) == codec.PARQUET
    assert pq.read_table(pa.BufferReader(await streamed(store, ref))) == await store.get(ref)
    assert await store.content_type(rows) == codec.JSON
    assert orjson.loads(await streamed(store, rows)) == [{"a": 3}, {"a": 5}]
