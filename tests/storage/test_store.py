"""Values in, references out, and back, in every tier."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import pandas as pd
import pyarrow as pa
import pytest

from noetl_dagster.errors import IntegrityError, ReferenceNotAvailableError, StorageError
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.locations import local_path
from noetl_dagster.storage.store import NewResult, ResultStore, fits_inline
from tests.storage.conftest import LASTING
from tests.waiting import until

MB = 1024 * 1024
WHERE = {"execution_id": 7, "step": "load", "name": "rows"}
TIERS = [*LASTING, StoreTier.MEMORY, StoreTier.EVENTLOG]


async def recorded(pool: asyncpg.Pool) -> int:
    return await pool.fetchval("SELECT count(*) FROM noetl.result_ref")


@pytest.mark.parametrize("tier", TIERS)
async def test_every_tier_returns_what_was_put_until_it_is_deleted(store: ResultStore, tier: StoreTier) -> None:
    for value in ({"id": 1, "names": ["a", "é"]}, [1, 2, 3], os.urandom(300_000), "text", None, b""):
        ref = await store.put(value, **WHERE, tier=tier)
        assert ref.store_tier is tier
        assert await store.get(ref.ref) == value
        streamed = b"".join([chunk async for chunk in store.stream(ref)])
        assert len(streamed) == ref.bytes_size
    await store.delete(ref)
    with pytest.raises(ReferenceNotAvailableError, match="not recorded"):
        await store.get(ref.ref)
    if tier is not StoreTier.EVENTLOG:  # whose references hold the bytes
        with pytest.raises(ReferenceNotAvailableError, match="nothing is at"):
            await store.get(ref)
    assert ReferenceNotAvailableError.code == "REFERENCE_NOT_AVAILABLE"


async def test_fifteen_megabytes_round_trip(store: ResultStore) -> None:
    rows = [{"id": number, "note": "patient " * 12} for number in range(20_000)]
    as_json = await store.put(rows, **WHERE, tier=StoreTier.MINIO)
    assert as_json.bytes_size > 2 * MB
    assert as_json.rows == 20_000
    assert await store.get(as_json) == rows

    spec = ResultSpec(content_type="application/octet-stream")
    blob = os.urandom(15 * MB)
    as_bytes = await store.put(blob, **WHERE, tier=StoreTier.DB, spec=spec)
    assert await store.get(as_bytes) == blob


async def test_tables_become_parquet(store: ResultStore) -> None:
    frame = pd.DataFrame({"id": [1, 2, 3], "name": ["a", "b", None]})
    ref = await store.put(frame, **WHERE)
    assert ref.content_type == "application/vnd.apache.parquet"
    assert ref.rows == 3
    assert set(ref.extra["columns"]) == {"id", "name"}
    assert '"id":1' in (ref.preview or "")
    table = await store.get(ref)
    assert isinstance(table, pa.Table)
    pd.testing.assert_frame_equal(table.to_pandas(), frame)


@pytest.mark.parametrize("compression", ["gzip", "lz4"])
async def test_compression_is_undone(store: ResultStore, compression: str) -> None:
    value = {"text": "abc" * 50_000}
    ref = await store.put(value, **WHERE, spec=ResultSpec(compression=compression))
    assert ref.compression == compression
    assert ref.bytes_size < 10_000
    assert await store.get(ref) == value

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * MB

    streamed = await store.put_stream(chunks(), **WHERE, spec=ResultSpec(compression=compression))
    assert streamed.bytes_size < MB
    assert await store.get(streamed) == b"x" * 4 * MB
    assert sum([len(chunk) async for chunk in store.stream(streamed)]) == 4 * MB


async def test_gzip_on_the_store_is_plain_gzip(store: ResultStore, settings: Settings) -> None:
    ref = await store.put({"a": 1}, **WHERE, tier=StoreTier.PVC, spec=ResultSpec(compression="gzip"))
    path = local_path(settings, ref.physical_uri)
    assert path is not None
    assert gzip.decompress(path.read_bytes()) == b'{"a":1}'


@pytest.mark.parametrize(
    ("value", "extracted"),
    [
        ({"count": 10, "page": {"count": 2}}, {"page.count": 2, "count": 10}),
        ({"data": {"count": 10}, "page": {"count": 2}}, {"page.count": 2, "count": 10}),
        ({"count": "x" * 9_000, "page": {"count": 2}}, {}),
    ],
)
async def test_a_selected_field_hides_none_of_the_value_itself(
    store: ResultStore, value: dict[str, Any], extracted: dict[str, Any]
) -> None:
    ref = await store.put(value, **WHERE, select=["page.count"])
    assert ref.extracted == extracted


async def test_preview_and_selected_fields(store: ResultStore, settings: Settings) -> None:
    value = {"rows": [{"id": 5}], "paging": {"page": 2}, "text": "é" * 5000}
    ref = await store.put(value, **WHERE, select=["paging.page", "rows.0.id", "rows.-1.id", "rows.9.id", "no"])
    assert ref.extracted == {"paging.page": 2, "rows.0.id": 5, "rows.-1.id": 5}
    assert ref.preview is not None
    assert len(ref.preview.encode()) <= codec.PREVIEW_BYTES
    assert await store.find(ref.ref) == ref


async def test_plain_python_values_become_json(store: ResultStore) -> None:
    value = {"price": Decimal("1.10"), "count": Decimal("3"), "tags": {"x"}, "at": datetime(2026, 1, 1, tzinfo=UTC)}
    ref = await store.put(codec.admitted(value), **WHERE)
    assert await store.get(ref) == {
        "price": "1.10",
        "count": "3",
        "tags": ["x"],
        "at": "2026-01-01T00:00:00+00:00",
    }
    with pytest.raises(TypeError, match="object"):
        await store.put(object(), **WHERE)


async def test_tier_follows_size_and_settings(settings: Settings, pool: asyncpg.Pool) -> None:
    chosen = settings.model_copy(update={"pvc_tier_threshold_bytes": 1000, "default_store_tier": StoreTier.OBJECT})
    async with ResultStore(chosen, pool) as store:
        assert (await store.put(b"x" * 1000, **WHERE)).store_tier is StoreTier.DISK
        assert (await store.put(b"x" * 1001, **WHERE)).store_tier is StoreTier.PVC
        asked = await store.put(b"x" * 1001, **WHERE, spec=ResultSpec(store=StoreTier.OBJECT))
        assert asked.store_tier is StoreTier.DISK
    async with ResultStore(chosen.model_copy(update={"pvc_mount_path": None}), pool) as store:
        assert (await store.put(b"x" * 1001, **WHERE)).store_tier is StoreTier.DISK
    assert fits_inline(settings.inline_result_bytes, settings)
    assert not fits_inline(settings.inline_result_bytes + 1, settings)


async def test_rows_written_as_object_are_read_from_disk(store: ResultStore, pool: asyncpg.Pool) -> None:
    ref = await store.put({"a": 1}, **WHERE, tier=StoreTier.DISK)
    await pool.execute("UPDATE noetl.result_ref SET store_tier = 'object' WHERE ref_id = $1", ref.ref_id)
    assert await store.get(ref.ref) == {"a": 1}


async def test_the_latest_of_a_name_is_found(store: ResultStore) -> None:
    first = await store.put(1, **WHERE)
    second = await store.put(2, **WHERE)
    assert (await store.find((7, "load", "rows"))).ref_id == second.ref_id
    assert await store.get(first) == 1
    with pytest.raises(ReferenceNotAvailableError, match="result 'other' of step 'load'"):
        await store.find((7, "load", "other"))


async def test_many_results_are_stored_together(store: ResultStore, pool: asyncpg.Pool) -> None:
    items = [NewResult({"n": number}, 7, "load", f"shard-{number}", select=["n"]) for number in range(300)]
    refs = await store.put_many(items)
    assert await recorded(pool) == 300
    assert [ref.extracted["n"] for ref in refs] == list(range(300))
    assert await store.get(refs[-1].ref) == {"n": 299}


async def test_a_reference_is_recorded_although_the_server_ends_its_session(
    store: ResultStore, pool: asyncpg.Pool
) -> None:
    waiting = """FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
        AND query LIKE '%INSERT INTO noetl.result_ref%'"""
    async with pool.acquire() as other, other.transaction():
        await other.execute("LOCK TABLE noetl.result_ref")
        put = asyncio.create_task(store.put("kept", **WHERE))
        await until(lambda: pool.fetchval(f"SELECT pid {waiting}"), "the reference to be written")
        assert await pool.fetchval(f"SELECT pg_terminate_backend(pid) {waiting}")
    assert await store.get(await put) == "kept"
    assert await recorded(pool) == 1


async def test_changed_bytes_are_found(store: ResultStore, settings: Settings) -> None:
    ref = await store.put(b"x" * 2 * MB, **WHERE, tier=StoreTier.PVC)
    path = local_path(settings, ref.physical_uri)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[MB] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="changed or damaged"):
        await store.get(ref)
    with pytest.raises(IntegrityError):
        async for _ in store.stream(ref):
            pass


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO, StoreTier.DB, StoreTier.S3, StoreTier.GCS])
async def test_a_stream_is_whole_or_absent(
    store: ResultStore, pool: asyncpg.Pool, settings: Settings, tier: StoreTier
) -> None:
    block = os.urandom(4 * MB)

    async def chunks(*, fails: bool) -> AsyncIterator[bytes]:
        for _ in range(5):
            yield block
        if fails:
            raise ConnectionResetError("the source went away")

    whole = await store.put_stream(chunks(fails=False), **WHERE, tier=tier)
    assert await store.get(whole) == 5 * block
    await store.delete(whole)
    with pytest.raises(ConnectionResetError):
        await store.put_stream(chunks(fails=True), **WHERE, tier=tier)
    assert await recorded(pool) == 0
    assert [key async for page in store._placement.tier(tier).keys("") for key in page] == []
    assert settings.pvc_mount_path is not None
    assert [path for path in settings.pvc_mount_path.rglob("*") if path.is_file()] == []
    assert await pool.fetchval("SELECT count(*) FROM noetl.result_blob") == 0


async def test_expired_results_are_refused_and_cleaned_up(store: ResultStore, pool: asyncpg.Pool) -> None:
    short = [await store.put(number, **WHERE, spec=ResultSpec(ttl=0.001)) for number in range(3)]
    kept = await store.put("kept", **WHERE, spec=ResultSpec(ttl=0.001, scope="permanent"))
    await asyncio.sleep(0.01)
    with pytest.raises(ReferenceNotAvailableError, match="expired"):
        await store.get(short[0])
    assert await store.cleanup(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert await store.cleanup() == 3
    assert await recorded(pool) == 1
    assert await store.get(kept) == "kept"
    with pytest.raises(ReferenceNotAvailableError):
        await store.get(short[0].model_copy(update={"expires_at": None}))


async def test_a_store_without_a_database_hands_references_on(settings: Settings) -> None:
    async with ResultStore(settings, None) as store:
        ref = await store.put([1, 2], **WHERE)
        assert await store.get(ResultRef.model_validate_json(ref.model_dump_json())) == [1, 2]
        assert ref.kind is RefKind.OBJECT
        with pytest.raises(StorageError, match="no database"):
            await store.get(ref.ref)
