"""Bytes that no reference names: found in every tier, and nothing else touched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noetl_dagster.engine.recovery.maintenance import Maintenance
from noetl_dagster.errors import ReferenceNotAvailableError
from noetl_dagster.events.projection import Projection
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.locations import local_path
from noetl_dagster.storage.placement import key_of, owner_of
from noetl_dagster.storage.store import ResultStore
from tests.storage.conftest import LASTING

ENDED, RUNNING, UNKNOWN, STARTED = 21, 22, 23, 24
TOMORROW = datetime.now(UTC) + timedelta(days=2)


@pytest.fixture(autouse=True)
async def executions(pool: asyncpg.Pool) -> None:
    await Projection(pool).catch_up()  # its first pass removes rows without events
    for execution_id, status in ((ENDED, "COMPLETED"), (RUNNING, "RUNNING")):
        await pool.execute("INSERT INTO noetl.execution (execution_id, status) VALUES ($1, $2)", execution_id, status)


async def rolled_back(store: ResultStore, pool: asyncpg.Pool, execution_id: int, tier: StoreTier) -> str:
    """A put whose row did not survive. Returns the URI that is left."""
    ref = await store.put({"a": 1}, execution_id=execution_id, step="load", name="rows", tier=tier)
    await pool.execute("DELETE FROM noetl.result_ref WHERE ref_id = $1", ref.ref_id)
    with pytest.raises(ReferenceNotAvailableError):
        await store.find(ref.ref)
    return ref.physical_uri


async def left(store: ResultStore, tier: StoreTier, uri: str) -> bool:
    return await store._placement.tier(tier).exists(uri)


@pytest.mark.parametrize("tier", LASTING)
async def test_bytes_of_a_rolled_back_put_are_removed(store: ResultStore, pool: asyncpg.Pool, tier: StoreTier) -> None:
    kept = await store.put([1, 2], execution_id=ENDED, step="load", name="rows", tier=tier)
    orphan = await rolled_back(store, pool, ENDED, tier)
    running = await rolled_back(store, pool, RUNNING, tier)
    foreign = await rolled_back(store, pool, UNKNOWN, tier)

    assert await store.sweep_orphans() == 0  # too young
    own = tier is StoreTier.DB
    assert await store.sweep_orphans(TOMORROW) == 1 + own
    assert not await left(store, tier, orphan)
    assert await left(store, tier, running)  # its reference may still come
    assert await left(store, tier, foreign) is not own  # another database's, in the same bucket
    assert await store.get(kept.ref) == [1, 2]
    assert await store.sweep_orphans(TOMORROW) == 0


@pytest.mark.parametrize(("column", "name"), [("result", "reference"), ("context", "collection_reference")])
async def test_an_object_that_the_log_names_stays(
    store: ResultStore, pool: asyncpg.Pool, column: str, name: str
) -> None:
    """Its row was lost, for example when tables were restored from different moments."""
    other = await rolled_back(store, pool, ENDED, StoreTier.MINIO)
    ref = await store.put([1, 2], execution_id=ENDED, step="load", name="rows", tier=StoreTier.MINIO)
    event = f"INSERT INTO noetl.event (execution_id, event_id, event_type, {column}) VALUES ($1, 1, 'command.completed', $2)"
    await pool.execute(event, ENDED, {"status": "ok", name: ref.model_dump(mode="json")})
    await pool.execute("DELETE FROM noetl.result_ref")
    assert await store.sweep_orphans(TOMORROW, execution_id=UNKNOWN) == 0
    assert await store.sweep_orphans(TOMORROW, execution_id=ENDED) == 1
    assert not await left(store, StoreTier.MINIO, other)
    assert await left(store, StoreTier.MINIO, ref.physical_uri)


async def test_an_object_whose_put_seemed_to_fail_is_removed(store: ResultStore, pool: asyncpg.Pool) -> None:
    """The answer of a put was lost, so that the bytes are in the fallback too, under the same reference id."""
    ref = await store.put([1, 2], execution_id=ENDED, step="load", name="rows", tier=StoreTier.DISK)
    key = key_of(ENDED, "load", "rows", ref.ref_id, ".json")
    uri = await store._placement.tier(StoreTier.MINIO).put(key, b"[1,2]")
    assert await store.sweep_orphans(TOMORROW) == 1
    assert not await left(store, StoreTier.MINIO, uri)
    assert await store.get(ref.ref) == [1, 2]


async def test_stores_of_one_log_lose_what_it_does_not_know(settings: Settings, pool: asyncpg.Pool) -> None:
    started = "INSERT INTO noetl.event (execution_id, event_id, event_type) VALUES ($1, 1, $2)"
    await pool.execute(started, STARTED, "playbook.initialized")
    async with ResultStore(settings.model_copy(update={"stores_shared": False}), pool) as store:
        unknown = await rolled_back(store, pool, UNKNOWN, StoreTier.MINIO)
        nobody = await rolled_back(store, pool, 0, StoreTier.MINIO)
        started_only = await rolled_back(store, pool, STARTED, StoreTier.MINIO)
        kept = await store.put([1], execution_id=UNKNOWN, step="load", name="rows", tier=StoreTier.MINIO)
        assert await store.sweep_orphans() == 0
        assert await store.sweep_orphans(TOMORROW) == 2
        assert not await left(store, StoreTier.MINIO, unknown)
        assert not await left(store, StoreTier.MINIO, nobody)
        assert await left(store, StoreTier.MINIO, started_only)  # the projection has not seen it yet
        assert await store.get(kept.ref) == [1]


async def test_a_dataset_that_was_never_registered_goes_file_by_file(store: ResultStore, settings: Settings) -> None:
    folders = {}
    for name in ("lost", "kept"):
        uri = store.dataset_uri(execution_id=ENDED, step="spark", name=name, tier=StoreTier.PVC)
        folders[name] = local_path(settings, uri) or Path()
        folders[name].mkdir(parents=True)
        for part in range(2):
            pq.write_table(pa.table({"n": [part]}), folders[name] / f"part-{part}.parquet")
    ref = await store.register_dataset(folders["kept"].as_uri(), execution_id=ENDED, step="spark", name="kept", rows=2)
    assert await store.sweep_orphans(TOMORROW) == 2
    assert list(folders["lost"].iterdir()) == []
    assert (await store.get(ref.ref)).num_rows == 2


async def test_half_written_and_other_files(store: ResultStore, settings: Settings) -> None:
    assert settings.pvc_mount_path is not None
    ref = await store.put(1, execution_id=ENDED, step="load", name="rows", tier=StoreTier.PVC)
    folder = (local_path(settings, ref.physical_uri) or Path()).parent
    half = folder / ".rows-5000.json.0a1b2c3d4e5f.part"
    others = [folder / "notes.txt", settings.pvc_mount_path / "exec" / "readme-7.txt"]
    for path in (half, *others):
        path.write_text("x")
    assert await store.sweep_orphans(TOMORROW) == 1
    assert not half.exists()
    assert all(path.exists() for path in others)


async def test_a_store_that_is_down_is_left_for_the_next_time(settings: Settings, pool: asyncpg.Pool) -> None:
    down = settings.model_copy(update={"minio_endpoint": "http://127.0.0.1:9"})
    async with ResultStore(down, pool) as store:
        orphan = await rolled_back(store, pool, ENDED, StoreTier.PVC)
        assert await store.sweep_orphans(TOMORROW) == 1
        assert not await left(store, StoreTier.PVC, orphan)


async def test_maintenance_sweeps_too(store: ResultStore, pool: asyncpg.Pool) -> None:
    orphan = await rolled_back(store, pool, ENDED, StoreTier.MINIO)
    maintained = await Maintenance(pool, store).run(TOMORROW)
    assert maintained.orphans == 1
    assert "1 orphaned objects deleted" in str(maintained)
    assert not await left(store, StoreTier.MINIO, orphan)


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        (key_of(5, "a step", "rows-7", 123, ".json"), (5, 123)),
        (key_of(5, "load", "rows", 123, ""), (5, 123)),
        ("exec/5/spark/rows-123.parquet/part=1/part-00000-9f.snappy.parquet", (5, 123)),
        ("exec/5/load/rows.json", None),
        ("exec/five/load/rows-123.json", None),
        ("assets/exec/5/load/rows-123.json", None),
    ],
)
def test_a_key_says_whose_it_is(key: str, owner: tuple[int, int] | None) -> None:
    assert owner_of(key) == owner
