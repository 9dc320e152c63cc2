"""What Dagster loads: three playbooks, and a Python asset on Spark."""

from pathlib import Path

from dagster import Definitions, load_assets_from_modules

from noetl_dagster import MinioIOManager, PySparkResource, load_playbooks
from spark_lake import assets

defs = Definitions.merge(
    load_playbooks(
        Path(__file__).parents[1] / "playbooks",
        resources={"pyspark": PySparkResource(), "lake": MinioIOManager(prefix="lake")},
    ),
    Definitions(assets=load_assets_from_modules([assets])),
)
