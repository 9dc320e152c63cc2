"""Spark frames as assets: Parquet datasets, in place on the shared volume, copied for buckets."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from dagster import DagsterInstance, asset, materialize
from pyspark.sql import DataFrame, SparkSession

from noetl_dagster import MinioIOManager, NoetlResultIOManager, PvcIOManager
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import ResultStore
from tests.io_managers.readers import reader_of

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("tier", ["pvc", "minio"])
def test_spark_frames_round_trip(
    session: SparkSession, settings: Settings, dagster_instance: DagsterInstance, tier: str
) -> None:
    seen: dict[str, Any] = {}

    @asset
    def numbers() -> DataFrame:
        return session.range(1000).repartition(3)

    manager = (
        PvcIOManager(mount_path=str(settings.pvc_mount_path))
        if tier == "pvc"
        else MinioIOManager(endpoint=settings.minio_endpoint, bucket=settings.minio_bucket)
    )
    readers = [reader_of("spark", numbers, DataFrame, seen), reader_of("pandas", numbers, pd.DataFrame, seen)]
    result = materialize([numbers, *readers], resources={"io_manager": manager}, instance=dagster_instance)
    assert result.success
    assert seen["spark"].count() == 1000
    assert len(seen["pandas"]) == 1000
    (materialization,) = result.asset_materializations_for_node("numbers")
    assert materialization.metadata["dagster/row_count"].value == 1000
    assert [column.type for column in materialization.metadata["dagster/column_schema"].value.columns] == ["bigint"]


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO])
def test_a_result_of_tables_is_one_frame(
    session: SparkSession,
    settings: Settings,
    shared: ResultStore,
    dagster_instance: DagsterInstance,
    tier: StoreTier,
) -> None:
    seen: dict[str, Any] = {}
    parts = [
        run_sync(shared.put(pa.table({"id": ids}), execution_id=5, step="load", name="part", tier=tier))
        for ids in ([1, 2], [3])
    ]
    ref = run_sync(shared.manifest(5, "load", "result", parts, Strategy.CONCAT))

    @asset
    def load() -> Any:
        return ref

    reader = reader_of("spark", load, DataFrame, seen)
    resources = {"io_manager": NoetlResultIOManager(lambda: shared)}
    assert materialize([load, reader], resources=resources, instance=dagster_instance).success

    assert sorted(row.id for row in seen["spark"].collect()) == [1, 2, 3]
