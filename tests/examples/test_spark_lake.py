"""The example ``spark_lake``: playbooks, and a Python asset on Spark between them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from dagster import AssetKey, AssetSelection, DagsterInstance, Definitions, define_asset_job

from noetl_dagster import embedded
from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.settings import Settings, get_settings
from tests.conftest import PROJECT

EXAMPLE = PROJECT / "examples" / "spark_lake"
VISITS, LOAD, OVERLOADED, HANDS = (
    AssetKey(["clinic", *name]) for name in (("visits",), ("ward_load",), ("plan", "overloaded"), ("plan", "hands"))
)


@pytest.fixture
def defs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Definitions]:
    """The project's Definitions, as Dagster loads them, on the servers of this test."""
    for name, value in embedded.environment(settings).items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("spark_lake.definitions").defs
    NoetlResource().close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "spark_lake"]:
        del sys.modules[name]
    get_settings.cache_clear()


@pytest.mark.spark
def test_lineage_and_results_through_all_three(defs: Definitions, dagster_instance: DagsterInstance) -> None:
    graph = defs.resolve_asset_graph()
    assert graph.get(LOAD).parent_keys == {VISITS}
    assert graph.get(OVERLOADED).parent_keys == {LOAD}
    assert graph.get(HANDS).parent_keys == {OVERLOADED}

    collected = defs.resolve_job_def("collect").execute_in_process(instance=dagster_instance)
    checks = collected.get_asset_check_evaluations()
    assert [check.passed for check in checks] == [True, True]

    between = Definitions.merge(defs, Definitions(jobs=[define_asset_job("between", AssetSelection.assets(LOAD))]))
    made = between.resolve_job_def("between").execute_in_process(instance=dagster_instance)
    (load,) = made.get_asset_materialization_events()
    assert load.materialization.metadata["dagster/row_count"].value == 3 * 28

    planned = defs.resolve_job_def("plan").execute_in_process(
        instance=dagster_instance, run_config={"ops": {"plan_playbook": {"config": {"most_minutes": 950}}}}
    )
    assert planned.success
    repository = defs.get_repository_def()
    hands = repository.load_asset_value(HANDS, instance=dagster_instance)
    assert set(hands) <= {"cardiology", "paediatrics", "surgery"}
    overloaded = repository.load_asset_value(OVERLOADED, instance=dagster_instance)
    assert sum(hands.values()) == overloaded["row_count"] > 0
    assert all(row["minutes"] > 950 for row in overloaded["rows"])
