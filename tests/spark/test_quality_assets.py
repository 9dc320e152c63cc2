"""The quality of an execution's datasets: the checks of step normalise and the report, as Dagster shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from dagster import AssetKey, DagsterInstance, Definitions, asset, materialize
from pyspark.sql import SparkSession

from examples.records_api import create_app
from noetl_dagster.code_location.definitions import build_definitions
from noetl_dagster.code_location.playbooks import resources_of
from noetl_dagster.code_location.python_assets import _module, definitions_in_python
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.resources.spark import PySparkResource
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.datasets import Layout, register, write_dataset
from tests.definitions import definitions_of
from tests.spark.test_flow import served

pytestmark = pytest.mark.spark

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
EXECUTION = 77
ROWS = {
    "assessments": (
        "a STRING, scale STRING, score INT, assessed_on DATE",
        "'A1', 'PHQ-9', 5, date'2024-01-01'",
    ),
    "conditions": (
        "condition_id STRING, description STRING, onset_on DATE, is_active BOOLEAN",
        "'C1', 'COPD', date'2024-01-01', true",
    ),
    "medications": (
        "medication_id STRING, drug_name STRING, dose_mg DECIMAL(9,2), started_on DATE",
        "'M1', 'metformin', 2.5, date'2024-01-01'",
    ),
    "vital_signs": (
        "vital_sign_id STRING, systolic_mmhg INT, diastolic_mmhg INT, pulse_per_minute INT, "
        "temperature_c DECIMAL(9,2), measured_on DATE",
        "'V1', 120, 80, NULL, 36.6, date'2024-01-01'",
    ),
    "demographics": (
        "family_name STRING, given_name STRING, born_on DATE",
        "'Ito', 'Ada', date'1950-01-01'",
    ),
}


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    definitions_in_python(PLAYBOOKS)
    return _module(PLAYBOOKS / "quality_assets.py")


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    yield EngineProvider(settings)
    close_engines()


def stored(spark: SparkSession, noetl: EngineProvider, *, spoiled: bool) -> list[dict[str, Any]]:
    """Datasets of one execution, as step normalise leaves them; gives the counts it gives."""
    store = noetl.engine().runtime.results
    layout = Layout(tier=StoreTier.PVC, partition_by=("facility_id",))
    for name, (columns, values) in ROWS.items():
        names = [column.split()[0] for column in columns.replace("a STRING", "assessment_id STRING", 1).split(", ")]
        shown = ", ".join(
            f"col{number} AS {column}" for number, column in enumerate(["facility_id", "patient_id", *names], 1)
        )
        frame = spark.sql(
            f"SELECT {shown} FROM VALUES ('F001', 'F001-P00001', {values}), ('F002', 'F002-P00001', {values})"
        )
        if spoiled and name == "medications":
            frame = frame.unionAll(frame.where("facility_id = 'F001'"))
        if spoiled and name == "vital_signs":
            frame = frame.selectExpr("* EXCEPT (systolic_mmhg)", "900 AS systolic_mmhg")
        uri = store.dataset_uri(execution_id=EXECUTION, step="normalise", name=name, tier=StoreTier.PVC)
        written = write_dataset(frame, store.settings, uri, layout)
        run_sync(register(written, store, layout, execution_id=EXECUTION, step="normalise", name=name))
    return [
        {"facility_id": facility, "data_type": name, "records": 1} for facility in ("F001", "F002") for name in ROWS
    ]


@pytest.mark.parametrize("spoiled", [False, True])
def test_the_report_measures_checks_and_draws(
    spark: SparkSession,
    noetl: EngineProvider,
    quality: ModuleType,
    dagster_instance: DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoiled: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = stored(spark, noetl, spoiled=spoiled)
    store = noetl.engine().runtime.results
    ref = run_sync(
        store.put({"rows": counts}, execution_id=EXECUTION, step="normalise", name="result", tier=StoreTier.EVENTLOG)
    )

    @asset(key=quality.NORMALISE, io_manager_key="noetl_results")
    def normalise() -> Any:
        return ref

    resources = resources_of(noetl) | {"pyspark": PySparkResource(master="local[2]")}
    assets = [normalise, quality.facility_quality]
    done = materialize(assets, resources=resources, instance=dagster_instance)
    evaluations = done.get_asset_check_evaluations()
    assert {event.asset_key for event in evaluations} == {quality.REPORT}
    passed = {event.check_name: event.passed for event in evaluations}
    expected = {"counts": not spoiled, "uniqueness": not spoiled, "nulls": True, "ranges": not spoiled}
    assert passed == expected
    (duplicated,) = [event for event in evaluations if event.check_name == "uniqueness"]
    assert duplicated.metadata["where"].value == ({"F001 medications": 1} if spoiled else {})
    rows = {
        (row["facility_id"], row["data_type"]): row
        for row in done.output_for_node("examples__patient_flow__facility_quality")
    }
    assert len(rows) == 10
    assert rows["F001", "medications"]["duplicates"] == int(spoiled)
    assert rows["F002", "vital_signs"]["out_of_range"] == int(spoiled)
    (shown,) = done.asset_materializations_for_node("examples__patient_flow__facility_quality")
    assert shown.metadata["picture"].value.startswith("![records of each facility](data:image/svg+xml;base64,")
    assert shown.metadata["noetl/ref"].value


async def test_the_playbooks_own_job_checks_what_it_has_normalised(
    spark: SparkSession,
    settings: Settings,
    dagster_instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shipped example as a Dagster run, over the real records API."""
    playbooks = {"default_postgres_credential": "embedded", "playbooks_path": PLAYBOOKS}
    noetl = EngineProvider(settings.model_copy(update=playbooks))
    job = definitions_of([load_playbook(PLAYBOOKS / "patient_flow.yaml")], noetl)
    defs = Definitions.merge(job, definitions_in_python(PLAYBOOKS))  # whose report is no part of the playbook's job
    workload = {"facilities": 1, "patients": 3, "batch_size": 3}
    try:
        async with served(create_app(seed=7)) as api_url:
            monkeypatch.setenv("NOETL_CREDENTIAL_RECORDS_API", api_url)
            done = await asyncio.to_thread(
                defs.resolve_job_def("patient_flow").execute_in_process,
                run_config={"ops": {"patient_flow_playbook": {"config": workload}}},
                instance=dagster_instance,
            )
    finally:
        await asyncio.to_thread(close_engines)
    assert done.success
    key = AssetKey(["examples", "patient_flow", "normalise"])
    evaluations = done.get_asset_check_evaluations()
    validate = AssetKey([*key.path[:-1], "validate"])
    own = {(key, "nobody_is_missing"), (validate, "every_facility_is_complete")}
    assert {(event.asset_key, event.check_name) for event in evaluations} == own
    assert all(event.passed for event in evaluations), [event.metadata for event in evaluations]
    shown = dagster_instance.get_latest_materialization_event(key)
    assert shown is not None
    metadata = shown.asset_materialization.metadata
    assert int(metadata["spark/stages"].value) >= len(ROWS), metadata  # both tasks: datasets and counts
    assert {f"spark/{name}" for name in ("tasks", "shuffle_write_bytes", "disk_spilled_bytes", "skew")} <= set(metadata)


def test_the_picture_is_svg(quality: ModuleType) -> None:
    row = {"facility_id": "F001", "data_type": "conditions", "records": 3, "duplicates": 1, "nulls": 0}
    root = ElementTree.fromstring(quality.picture([row | {"out_of_range": 0, "uncounted": 1}]))
    assert root.tag.endswith("svg")
    assert "3, 2 bad" in [text.text for text in root.iter() if text.tag.endswith("text")]


def test_assets_beside_playbooks_are_part_of_the_code_location(settings: Settings, tmp_path: Path) -> None:
    defs = build_definitions(settings.model_copy(update={"playbooks_path": PLAYBOOKS}))
    assert defs.resolve_job_def("facility_quality").name == "facility_quality"
    (tmp_path / "broken_assets.py").write_text("import nothing_of_that_name")
    assert not definitions_in_python(tmp_path).assets
