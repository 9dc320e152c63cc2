"""Somebody's Dagster project, without playbooks: partitioned assets of every kind, read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    DagsterInstance,
    ExecuteInProcessResult,
    IOManager,
    StaticPartitionsDefinition,
    asset,
    materialize,
)
from pyspark.sql import DataFrame as SparkFrame
from pyspark.sql import SparkSession

from noetl_dagster import MinioIOManager, PvcIOManager
from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings

pytestmark = pytest.mark.spark

REGIONS = StaticPartitionsDefinition(["north", "south/west"])
ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


@pytest.fixture
def manager(settings: Settings) -> IOManager:
    return MinioIOManager(endpoint=settings.minio_endpoint, bucket=settings.minio_bucket, prefix="lake")


def producers(session: SparkSession, folder: Path) -> list[AssetsDefinition]:
    def report(context: AssetExecutionContext) -> Path:
        path = folder / "report.txt"
        path.write_text(f"report of {context.partition_key}")
        return path

    values: dict[str, Any] = {
        "raw": lambda context: b"\x00\x01\x02",
        "note": lambda context: f"hé {context.partition_key}",
        "limits": lambda context: {"region": context.partition_key, "limit": 3},
        "rows": lambda context: ROWS,
        "by_pandas": lambda context: pd.DataFrame(ROWS),
        "by_arrow": lambda context: pa.Table.from_pylist(ROWS),
        "by_polars": lambda context: pl.DataFrame(ROWS),
        "by_spark": lambda context: session.createDataFrame(pd.DataFrame(ROWS)),
        "report": report,
    }
    return [made_by(name, value) for name, value in values.items()]


def made_by(name: str, value: Any) -> AssetsDefinition:
    def make(context) -> Any:  # type: ignore[no-untyped-def]  # Dagster reads no text annotation here
        return value(context)

    return asset(name=name, partitions_def=REGIONS)(make)


def annotated(function: Any, **kinds: Any) -> Any:
    """``from __future__ import annotations`` makes annotations text, which Dagster would look up by name."""
    function.__annotations__ = kinds
    return function


def consumer(seen: dict[str, Any]) -> AssetsDefinition:
    def read(raw, note, limits, rows, by_pandas, by_arrow, by_polars, by_spark, report):  # type: ignore[no-untyped-def]
        seen.update(
            raw=raw,
            note=note,
            limits=limits,
            rows=rows,
            by_pandas=by_pandas,
            by_arrow=by_arrow,
            by_polars=by_polars,
            by_spark=sorted(row["id"] for row in by_spark.collect()),
            report=report.read_text(),
        )

    kinds = {
        "raw": bytes,
        "note": str,
        "limits": dict,
        "rows": pd.DataFrame,
        "by_pandas": pl.DataFrame,
        "by_arrow": pd.DataFrame,
        "by_polars": pa.Table,
        "by_spark": SparkFrame,
        "report": Path,
    }
    return asset(name="consumer", partitions_def=REGIONS)(annotated(read, **kinds))


def test_partitions_of_every_kind_arrive_as_annotated(
    session: SparkSession, settings: Settings, manager: IOManager, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}
    assets = [*producers(session, tmp_path), consumer(seen)]
    resources: dict[str, Any] = {"io_manager": manager}
    frames = [one for one in assets if one.key.path == ["by_polars"]]
    for chosen, region in ((frames, "north"), (assets, "south/west")):
        result = materialize(chosen, resources=resources, partition_key=region, instance=dagster_instance)
        assert result.success
    assert_says_what_is_where(result, settings.minio_bucket)
    assert seen["raw"] == b"\x00\x01\x02"
    assert seen["note"] == "hé south/west"
    assert seen["limits"] == {"region": "south/west", "limit": 3}
    assert seen["report"] == "report of south/west"
    pd.testing.assert_frame_equal(seen["rows"], pd.DataFrame(ROWS))
    pd.testing.assert_frame_equal(seen["by_arrow"], pd.DataFrame(ROWS))
    assert isinstance(seen["by_pandas"], pl.DataFrame)
    assert seen["by_pandas"].to_dicts() == ROWS
    assert isinstance(seen["by_polars"], pa.Table)
    assert seen["by_polars"].to_pylist() == ROWS
    assert seen["by_spark"] == [1, 2]

    together: dict[str, Any] = {}

    def both(by_polars):  # type: ignore[no-untyped-def]
        together.update(by_polars)

    whole = asset(name="both")(annotated(both, by_polars=dict[str, pl.DataFrame]))
    assert materialize([*frames, whole], selection=[whole], resources=resources, instance=dagster_instance).success
    assert {region: frame.height for region, frame in together.items()} == {"north": 2, "south/west": 2}
    assert all(isinstance(frame, pl.DataFrame) for frame in together.values())


FACTS = {
    # rows, columns, a piece of the preview
    "raw": (None, None, None),
    "note": (None, None, "hé south/west"),
    "limits": (None, None, "| south/west | 3 |"),
    "rows": (2, None, "| id | name |"),
    "by_pandas": (2, ["id", "name"], "| id | name |"),
    "by_arrow": (2, ["id", "name"], "| id | name |"),
    "by_polars": (2, ["id", "name"], "| id | name |"),
    "by_spark": (2, ["id", "name"], None),
    "report": (None, None, None),
}


def assert_says_what_is_where(result: ExecuteInProcessResult, bucket: str) -> None:
    for name, (rows, columns, preview) in FACTS.items():
        (materialization,) = result.asset_materializations_for_node(name)
        metadata = {entry: value.value for entry, value in materialization.metadata.items()}
        assert metadata["dagster/uri"].startswith(f"s3://{bucket}/lake/{name}/south/west/")
        assert metadata["dagster/storage_kind"] == "minio"
        assert not {"uri", "tier", "dagster/row_count"} & metadata.keys()
        assert metadata["bytes"] > 0
        assert metadata.get("dagster/partition_row_count") == rows, name
        schema = metadata.get("dagster/column_schema")
        assert (schema and [column.name for column in schema.columns]) == columns, name
        assert preview is None or preview in metadata["preview"], name
        assert len(metadata.get("sha256", "")) == (0 if name == "by_spark" else 64)  # Spark makes a folder


def test_a_value_that_cannot_be_had_as_annotated_is_told(manager: IOManager, dagster_instance: DagsterInstance) -> None:
    def limits() -> dict[str, int]:
        return {"limit": 3}

    def frame(limits):  # type: ignore[no-untyped-def]
        raise AssertionError("never reached")

    assets = [asset(limits), asset(annotated(frame, limits=pd.DataFrame))]
    with pytest.raises(StorageError, match=r"limits: .*/lake/limits/.* is a dict, which is no table"):
        materialize(assets, resources={"io_manager": manager}, instance=dagster_instance)


def test_a_partition_that_was_never_made_is_named(manager: IOManager, dagster_instance: DagsterInstance) -> None:
    upstream = made_by("upstream", lambda context: 1)

    def read(upstream):  # type: ignore[no-untyped-def]
        raise AssertionError("never reached")

    downstream = asset(name="downstream", partitions_def=REGIONS)(annotated(read, upstream=int))
    with pytest.raises(StorageError, match=r"nothing is stored at .*upstream/north.*materialise it first"):
        materialize(
            [upstream, downstream],
            selection=[downstream],
            partition_key="north",
            resources={"io_manager": manager},
            instance=dagster_instance,
        )


def test_bytes_that_were_changed_are_refused(settings: Settings, dagster_instance: DagsterInstance) -> None:
    def rows() -> list[dict[str, Any]]:
        return ROWS

    def read(rows):  # type: ignore[no-untyped-def]
        raise AssertionError("never reached")

    assets = [asset(rows), asset(name="read")(annotated(read, rows=list))]
    resources: dict[str, Any] = {"io_manager": PvcIOManager(mount_path=str(settings.pvc_mount_path))}
    materialize(assets[:1], resources=resources, instance=dagster_instance)
    assert settings.pvc_mount_path is not None
    (stored,) = (settings.pvc_mount_path / "assets" / "rows").iterdir()
    stored.write_text(json.dumps([{"id": 9, "name": "z"}]))
    with pytest.raises(StorageError, match="were changed or damaged"):
        materialize(assets, selection=assets[1:], resources=resources, instance=dagster_instance)
