"""The Spark session as a Dagster resource: the session of the process, started on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import asset, materialize
from pyspark.sql import SparkSession

from noetl_dagster.resources.spark import PySparkResource
from noetl_dagster.settings import Settings

pytestmark = pytest.mark.spark


def test_an_asset_gets_the_session_that_spark_steps_use(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    @asset
    def totals(pyspark: PySparkResource) -> int:
        seen.append(pyspark.spark_session.sparkContext.applicationId)
        return pyspark.spark_session.range(4).count()

    result = materialize([totals], resources={"pyspark": PySparkResource(master="local[2]")})
    assert result.output_for_node("totals") == 4
    assert seen == [spark.sparkContext.applicationId]


def test_run_config_says_where_spark_is_and_nothing_starts_before_it_is_used() -> None:
    seen: list[Settings] = []

    @asset
    def untouched(pyspark: PySparkResource) -> None:
        seen.append(pyspark._settings())

    given = {"master": "spark://nowhere.invalid:7077", "driver_memory": "3g"}
    config = {"resources": {"pyspark": {"config": given | {"spark_config": {"spark.executor.cores": 2}}}}}
    done = materialize([untouched], resources={"pyspark": PySparkResource.configure_at_launch()}, run_config=config)
    assert done.success
    assert (seen[0].spark_master, seen[0].spark_driver_memory) == ("spark://nowhere.invalid:7077", "3g")
    assert seen[0].spark_config == {"spark.executor.cores": "2"}


def test_nested_configuration_is_flattened() -> None:
    resource = PySparkResource(master="local[3]", spark_config={"spark": {"executor": {"memory": "4g"}}})
    settings = resource._settings()
    assert settings.spark_master == "local[3]"
    assert settings.spark_config == {"spark.executor.memory": "4g"}
