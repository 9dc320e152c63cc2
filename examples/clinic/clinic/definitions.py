"""What Dagster loads: two playbooks, and an asset of Python between them."""

from pathlib import Path

from dagster import Definitions, load_assets_from_modules

from clinic import assets
from noetl_dagster import MinioIOManager, PySparkResource, load_playbooks

defs = Definitions.merge(
    load_playbooks(
        Path(__file__).parents[1] / "playbooks",
        resources={"pyspark": PySparkResource(), "lake": MinioIOManager(prefix="lake")},
    ),
    Definitions(assets=load_assets_from_modules([assets])),
)
