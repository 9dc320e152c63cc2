"""Two playbooks, and a Python asset between them."""

from pathlib import Path

from dagster import AssetIn, Definitions, asset

from noetl_dagster import load_playbooks


@asset(
    key=["clinic_lite", "load"],
    ins={"visits": AssetIn(["clinic_lite", "visits", "collect"], input_manager_key="noetl_results")},
    io_manager_key="noetl_results",
)
def load(visits: list) -> dict:
    """Minutes of each ward."""
    minutes: dict[str, int] = {}
    for visit in visits:
        minutes[visit["ward"]] = minutes.get(visit["ward"], 0) + visit["minutes"]
    return minutes


defs = Definitions.merge(load_playbooks(Path(__file__).parents[1] / "playbooks"), Definitions(assets=[load]))
