"""The shared volume: nothing leaves it, and processes exchange files through it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import StorageError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.store import ResultStore

MB = 1024 * 1024
WHERE = {"execution_id": 4, "step": "load", "name": "rows"}


def volume(settings: Settings) -> Path:
    assert settings.pvc_mount_path is not None
    return settings.pvc_mount_path


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..", "..\\up"])
@pytest.mark.parametrize("field", ["step", "name"])
async def test_names_cannot_climb_out(store: ResultStore, settings: Settings, field: str, name: str) -> None:
    where = {**WHERE, field: name}
    ref = await store.put(1, **where, tier=StoreTier.PVC)
    path = locations.local_path(settings, ref.physical_uri)
    assert path is not None
    assert path.resolve().parents[1] == volume(settings).resolve() / "exec" / "4"
    assert (await store.find((4, where["step"], where["name"]))).ref == ref.ref


async def test_odd_names_become_plain_ones(store: ResultStore, settings: Settings) -> None:
    ref = await store.put(1, execution_id=4, step="step one/é", name=".hidden name", tier=StoreTier.PVC)
    path = locations.local_path(settings, ref.physical_uri)
    assert path is not None
    assert path.parent == volume(settings).resolve() / "exec" / "4" / "step_one__"
    assert path.name.startswith("hidden_name-")
    assert (await store.find((4, "step one/é", ".hidden name"))).ref == ref.ref


async def test_symbolic_links_do_not_lead_out(store: ResultStore, settings: Settings, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("1")
    (volume(settings) / "exec").symlink_to(outside)
    with pytest.raises(StorageError, match="leaves the mount"):
        await store.put(1, **WHERE, tier=StoreTier.PVC)
    assert [path.name for path in outside.iterdir()] == ["secret.json"]

    uri = (volume(settings) / "exec" / "secret.json").as_uri()
    with pytest.raises(StorageError, match="below no mount"):
        locations.read_bytes(settings, uri)


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "/etc/passwd", "file://{mount}/../../etc/passwd"])
async def test_references_to_other_files_are_refused(store: ResultStore, settings: Settings, uri: str) -> None:
    good = await store.put(1, **WHERE, tier=StoreTier.PVC)
    forged = good.model_copy(update={"physical_uri": uri.format(mount=volume(settings)), "sha256": None})
    with pytest.raises(StorageError, match="leaves the mount"):
        await store.get(forged)
    with pytest.raises(StorageError, match="leaves the mount"):
        await store.delete(forged)
    with pytest.raises(StorageError, match="below no mount"):
        locations.local_path(settings, forged.physical_uri)


async def test_readers_see_whole_files_only(store: ResultStore, settings: Settings) -> None:
    ref = await store.put(os.urandom(MB), **WHERE, tier=StoreTier.PVC)
    path = locations.local_path(settings, ref.physical_uri)
    assert path is not None
    assert [other.name for other in path.parent.iterdir()] == [path.name]  # no temporary file is left
    assert path.stat().st_mode & 0o777 == 0o600


def count_with_duckdb(settings: Settings, ref: ResultRef) -> int:
    """Reads in place."""
    path = locations.local_path(settings, ref.physical_uri)
    return count_rows(str(path))


def count_rows(place: str) -> int:
    with duckdb.connect() as connection:
        (count,) = connection.execute("SELECT count(*) FROM read_parquet(?)", [place]).fetchone() or (0,)
    return int(count)


@pytest.mark.parametrize("megabytes", [20, pytest.param(1024, marks=pytest.mark.slow)])
async def test_large_parquet_is_counted_in_place(
    store: ResultStore, settings: Settings, tmp_path: Path, megabytes: int
) -> None:
    source = tmp_path / "source.parquet"
    rows = write_random_parquet(source, megabytes * MB)
    ref = await store.put_stream(chunks_of(source), **WHERE, content_type="application/vnd.apache.parquet")
    assert ref.store_tier is StoreTier.PVC
    assert ref.bytes_size >= megabytes * MB
    assert ref.physical_uri.endswith(".parquet")
    assert count_with_duckdb(settings, ref) == rows
    assert count_rows(ref.physical_uri) == rows  # the URI itself works in a query too


def write_random_parquet(path: Path, size: int) -> int:
    """A Parquet file of at least ``size`` bytes that does not compress. Returns its rows."""
    rows, group = 0, 64 * 1024
    schema = pa.schema([("id", pa.int64()), ("payload", pa.binary(64))])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while path.stat().st_size < size:
            payload = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(64), group, [None, pa.py_buffer(os.urandom(group * 64))]
            )
            ids = pa.array(range(rows, rows + group), pa.int64())
            writer.write_table(pa.table([ids, payload], schema=schema))
            rows += group
    return rows


async def chunks_of(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(4 * MB):
            yield chunk
