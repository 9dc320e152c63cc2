"""Ordinary Dagster assets between the playbooks."""

from dagster import AssetIn, AutomationCondition, asset
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention


@asset(
    key=["clinic", "ward_load"],
    ins={"visits": AssetIn(key=["clinic", "visits"], input_manager_key="noetl_results")},
    io_manager_key="lake",
    group_name="clinic",
    kinds={"spark", "parquet"},
    automation_condition=AutomationCondition.eager(),
)
def ward_load(visits: DataFrame) -> DataFrame:
    """Visits and minutes of each ward and day. Spark reads the stored visits in place."""
    return visits.groupBy("ward", "day").agg(F.count("*").alias("visits"), F.sum("minutes").alias("minutes"))
