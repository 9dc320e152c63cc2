"""Spark frames as assets: Parquet datasets, in place on the shared volume, copied for buckets."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from dagster import DagsterInstance, asset, materialize
from pyspark.sql import DataFrame, SparkSession

from noetl_dagster.io_managers import MinioIOManager, PvcIOManager
from noetl_dagster.settings import Settings
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
    assert [column.type for column in materialization.metadata["dagster/column_schema"].value.columns] == [
        "bigint"
    ]
