"""Playbooks in a project of one's own: merged with what else it has, under keys of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetCheckKey,
    AssetKey,
    AssetSpec,
    AutomationCondition,
    DagsterInstance,
    DagsterInvalidDefinitionError,
    DailyPartitionsDefinition,
    Definitions,
    asset,
)

from noetl_dagster.code_location.definitions import load_playbooks
from noetl_dagster.code_location.folder import PlaybookStep
from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.resources.noetl import NoetlResource
from tests.playbooks import text_of

GOOD = "workflow:\n  - {step: start, tool: {kind: noop}}\n"
BROKEN = "workflow: []\n"

MAKES = """
dagster: {owners: ["team:raw"]}
workflow:
  - step: patients
    tool: {kind: python, code: "result = {'rows': [{'id': 1}, {'id': 2}]}"}
    checks: [{unique: id, name: ids}]
"""
READS = """
workload: {stumble: false}
workflow:
  - step: count
    from: {patients: tests/makes/patients}
    tool: {kind: python, input: {rows: "{{ patients.rows }}"}, code: "result = {'count': len(rows)}"}
    next: [report]
  - step: report
    tool:
      kind: python
      input: {stumble: "{{ stumble }}", count: "{{ count.count }}"}
      code: |
        if stumble:
            raise ValueError('stumbled')
        result = count
"""


def folder_of(path: Path, **playbooks: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in playbooks.items():
        (path / f"{name}.yaml").write_text(text_of(name, text))
    return path


def jobs_of(defs: Definitions) -> set[str]:
    names = {job.name for job in defs.get_repository_def().get_all_jobs()}
    return {name for name in names if not name.startswith(("__", "noetl_"))}


def why_of(defs: Definitions) -> str:
    """What the placeholders of broken playbooks say."""
    graph = defs.resolve_asset_graph()
    return "\n".join(str(graph.get(key).description) for key in graph.get_all_asset_keys())


def below_the_lake(spec: AssetSpec, step: PlaybookStep) -> AssetSpec:
    return spec.replace_attributes(
        key=spec.key.with_prefix("lake"),
        group_name="lake",
        automation_condition=AutomationCondition.eager(),
    ).merge_attributes(tags={"tools": "-".join(step.kinds)})


def run(defs: Definitions, job: str, instance: DagsterInstance, **workload: Any) -> Any:
    config = {"ops": {f"{job}_playbook": {"config": workload}}} if workload else None
    return defs.resolve_job_def(job).execute_in_process(instance=instance, run_config=config, raise_on_error=False)


def test_playbooks_are_merged_into_a_project(tmp_path: Path) -> None:
    @asset
    def totals() -> int:
        return 1

    defs = Definitions.merge(load_playbooks(folder_of(tmp_path, one=GOOD)), Definitions(assets=[totals]))
    assert jobs_of(defs) == {"one"}
    assert {AssetKey("totals"), AssetKey(["tests", "one", "start"])} <= set(
        defs.resolve_asset_graph().get_all_asset_keys()
    )
    assert isinstance(defs.resources and defs.resources["noetl"], NoetlResource)


def test_two_folders_in_one_project(tmp_path: Path) -> None:
    first = load_playbooks(folder_of(tmp_path / "first", one=GOOD, bad=BROKEN))
    second = load_playbooks(folder_of(tmp_path / "second", two=GOOD, bad=BROKEN), control=False)
    defs = Definitions.merge(first, second)
    assert jobs_of(defs) == {"one", "two"}
    broken = {key for key in defs.resolve_asset_graph().get_all_asset_keys() if key.path[0] == "broken_playbooks"}
    assert len(broken) == 2, "each folder shows its own"
    sensors = defs.get_repository_def().sensor_defs
    recovered = [{target.job_name for target in one.targets} for one in sensors if "recovery" in one.name]
    assert recovered == [{"one"}, {"two"}]


def test_upkeep_is_left_out_where_another_has_it(tmp_path: Path) -> None:
    acts = "dagster: {automation: eager, pools: {api: 2}, observe: [{asset: lake/raw, object: '*.csv'}]}\n" + GOOD
    defs = load_playbooks(folder_of(tmp_path, one=acts), control=False)
    assert not defs.get_repository_def().schedule_defs
    names = sorted(sensor.name.rpartition(f"_{tmp_path.name}")[0] for sensor in defs.get_repository_def().sensor_defs)
    assert names == ["noetl_automation", "noetl_observe", "noetl_pools", "noetl_recovery"]


def test_files_are_included_and_excluded(tmp_path: Path) -> None:
    folder_of(tmp_path, one=GOOD, two=GOOD)
    folder_of(tmp_path / "drafts", three=GOOD)
    assert jobs_of(load_playbooks(tmp_path)) == {"one", "two", "three"}
    assert jobs_of(load_playbooks(tmp_path, exclude=["drafts/*"])) == {"one", "two"}
    folder_of(tmp_path / "drafts" / "deep", four=GOOD)
    folder_of(tmp_path / "x" / "drafts", five=GOOD)
    assert jobs_of(load_playbooks(tmp_path, exclude=["drafts/*"])) == {"one", "two", "five"}
    assert jobs_of(load_playbooks(tmp_path, exclude=["**/drafts"])) == {"one", "two"}
    assert jobs_of(load_playbooks(tmp_path, include=["t*.yaml"])) == {"two"}
    assert jobs_of(load_playbooks(tmp_path, include=["**/t*.yaml"])) == {"two", "three"}
    assert jobs_of(load_playbooks(tmp_path, include=["**/t*.yaml"], exclude=["drafts"])) == {"two"}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DagsterInvalidDefinitionError, match="nowhere is no folder"):
        load_playbooks(tmp_path / "nowhere")


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, one=GOOD)
    with pytest.raises(DagsterInvalidDefinitionError, match=r"include is a list of patterns: \['one\*'\]"):
        load_playbooks(folder, include="one*")
    with pytest.raises(DagsterInvalidDefinitionError, match="is a NoetlResource, not a str"):
        load_playbooks(folder, resources={"noetl": "x"})
    nothing = load_playbooks(folder, translation=lambda spec, step: None)  # type: ignore[arg-type, return-value]
    assert "step start: its translation gives a NoneType, not an AssetSpec" in why_of(nothing)


def test_what_only_a_playbook_says_is_not_translated(tmp_path: Path) -> None:
    def daily(spec: AssetSpec, step: PlaybookStep) -> AssetSpec:
        return spec.replace_attributes(partitions_def=DailyPartitionsDefinition("2026-01-01"))

    assert "step start: its translation gives it another partitions_def" in why_of(
        load_playbooks(folder_of(tmp_path, one=GOOD), translation=daily)
    )


def test_a_translation_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def strict(spec: AssetSpec, step: PlaybookStep) -> AssetSpec:
        return spec.replace_attributes(group_name={"one": "first"}[step.playbook.name])

    defs = load_playbooks(folder_of(tmp_path, one=GOOD, two=GOOD), translation=strict)
    assert jobs_of(defs) == {"one"}
    assert "two.yaml: step start: its translation fails: KeyError: 'two'" in why_of(defs)


@pytest.mark.parametrize("parts", [[], [""]])
def test_a_translation_to_an_empty_key_takes_no_other_with_it(tmp_path: Path, parts: list[str]) -> None:
    def nameless(spec: AssetSpec, step: PlaybookStep) -> AssetSpec:
        return spec.replace_attributes(key=AssetKey(parts)) if step.playbook.name == "one" else spec

    defs = load_playbooks(folder_of(tmp_path, one=GOOD, two=GOOD), translation=nameless)
    assert jobs_of(defs) == {"two"}
    assert "one.yaml: step start: its translation gives it an empty key" in why_of(defs)


def test_a_translation_parts_twins(tmp_path: Path) -> None:
    twins = {name: GOOD.replace("start,", "start, asset: {key: lake/same},") for name in ("one", "two")}

    def apart(spec: AssetSpec, step: PlaybookStep) -> AssetSpec:
        return spec.replace_attributes(key=spec.key.with_prefix(step.playbook.name))

    assert jobs_of(load_playbooks(folder_of(tmp_path, **twins))) == {"one"}
    assert jobs_of(load_playbooks(folder_of(tmp_path, **twins), translation=apart)) == {"one", "two"}


def test_translated_assets(tmp_path: Path) -> None:
    defs = load_playbooks(folder_of(tmp_path, makes=MAKES, reads=READS), translation=below_the_lake)
    graph = defs.resolve_asset_graph()
    patients, count = (
        graph.get(AssetKey(["lake", "tests", *name])) for name in (("makes", "patients"), ("reads", "count"))
    )
    assert (patients.group_name, patients.owners) == ("lake", ["team:raw"])
    assert patients.tags["tools"] == "python"
    assert patients.automation_condition == AutomationCondition.eager()
    assert count.parent_keys == {patients.key}, "lineage follows the new keys"
    assert graph.asset_check_keys == {AssetCheckKey(patients.key, "ids")}


def test_runs_of_translated_playbooks(tmp_path: Path, noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    folder = folder_of(tmp_path / "playbooks", makes=MAKES, reads=READS)
    defs = load_playbooks(folder, translation=below_the_lake, resources={"noetl": noetl})
    made = run(defs, "makes", dagster_instance)
    assert made.success
    (checked,) = made.get_asset_check_evaluations()
    assert checked.asset_check_key == AssetCheckKey(AssetKey(["lake", "tests", "makes", "patients"]), "ids")
    failed = run(defs, "reads", dagster_instance, stumble=True)
    assert not failed.success
    made_of_it = {event.asset_key.path[-1] for event in failed.get_asset_materialization_events()}
    assert made_of_it == {"count"}, "it has read the other playbook's result"

    async def assets_in_the_log() -> set[str]:
        rows = await noetl.engine().runtime.pool.fetch(
            "SELECT DISTINCT meta ->> 'asset' AS key FROM noetl.event WHERE event_type = 'step.exit'"
        )
        return {row["key"] for row in rows}

    assert noetl.run(assets_in_the_log()) == {
        f"lake/tests/{name}" for name in ("makes/patients", "reads/count", "reads/report")
    }


def test_a_resumed_execution_keeps_its_keys(
    tmp_path: Path, noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    folder = folder_of(tmp_path / "playbooks", makes=MAKES, reads=READS)
    defs = load_playbooks(folder, translation=below_the_lake, resources={"noetl": noetl})
    run(defs, "makes", dagster_instance)
    failed = run(defs, "reads", dagster_instance, stumble=True)
    recorded = dagster_instance.get_run_by_id(failed.run_id)
    assert recorded is not None
    execution = noetl.run(noetl.engine().runtime.load(int(recorded.tags[EXECUTION_TAG])))
    assert execution.playbook.asset_key("report") == ("lake", "tests", "reads", "report")
    elsewhere = EngineProvider(noetl.settings.model_copy(update={"worker_slots": 3}))
    try:
        found = elsewhere.run(elsewhere.engine().runtime.load(execution.id))
        assert found.playbook.asset_key("report") == ("lake", "tests", "reads", "report")
    finally:
        elsewhere.close()
