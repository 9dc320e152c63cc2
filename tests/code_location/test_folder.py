"""A folder of playbooks as one code location: what is broken takes nothing else with it, and is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance, Definitions, build_sensor_context

from noetl_dagster.code_location.definitions import build_definitions, load_playbooks
from noetl_dagster.settings import Settings
from tests.playbooks import text_of

GOOD = "workflow:\n  - {step: start, tool: {kind: noop}}\n"
UPKEEP = {"noetl_reaper", "noetl_maintenance"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def defined(folder: Path) -> Definitions:
    return build_definitions(Settings(playbooks_path=folder))


def jobs_of(defs: Definitions) -> set[str]:
    names = {job.name for job in defs.get_repository_def().get_all_jobs() if not job.name.startswith("__")}
    return names - UPKEEP


def write(folder: Path, **playbooks: str) -> None:
    for name, text in playbooks.items():
        (folder / f"{name}.yaml").write_text(text_of(name, text))


def why_of(defs: Definitions) -> str:
    """What the placeholders of broken playbooks say."""
    graph = defs.resolve_asset_graph()
    nodes = [graph.get(key) for key in graph.get_all_asset_keys() if key.path[0] == "broken_playbooks"]
    return "\n".join(str(node.description) for node in nodes)


def test_a_broken_playbook_is_a_failing_check(folder: Path) -> None:
    write(folder, good=GOOD, bad="workflow:\n  - {step: start, tool: {kind: noop}, next: [nowhere]}\n")
    defs = defined(folder)
    assert jobs_of(defs) == {"good"}
    key = AssetKey(["broken_playbooks", "bad.yaml"])
    assert "bad.yaml:5:" in why_of(defs)
    assert "next leads to unknown step 'nowhere'" in why_of(defs)
    with DagsterInstance.ephemeral() as instance:
        sensor = defs.get_repository_def().get_sensor_def("noetl_playbooks")
        result = sensor.evaluate_tick(build_sensor_context(instance=instance))
        (event,) = result.asset_events
        assert (event.asset_key, event.check_name, event.passed) == (key, "loads", False)
        assert "unknown step 'nowhere'" in str(event.description)
        again = sensor.evaluate_tick(build_sensor_context(instance=instance, cursor=result.cursor))
        assert not again.asset_events, "told once, until something changes"


def test_a_lenient_folder_has_playbooks_that_are_not_understood(folder: Path) -> None:
    write(folder, foreign="workflow:\n  - {step: start, tool: {kind: quantum}}\n")
    assert jobs_of(load_playbooks(folder)) == set()
    assert jobs_of(load_playbooks(folder, lenient=True)) == {"foreign"}


def test_broken_playbooks_of_one_name_in_folders_of_one_name(folder: Path) -> None:
    for outer in ("a", "b"):
        (folder / outer / "x").mkdir(parents=True)
        (folder / outer / "x" / "bad.yaml").write_text(text_of("bad", "workflow: []\n"))
    write(folder, good=GOOD)
    defs = defined(folder)
    assert jobs_of(defs) == {"good"}
    shown = {key.path[1] for key in defs.resolve_asset_graph().get_all_asset_keys() if len(key.path) == 4}
    assert shown == {"a", "b"}


def test_a_folder_without_broken_playbooks_has_no_placeholders(folder: Path) -> None:
    write(folder, good=GOOD)
    defs = defined(folder)
    assert not why_of(defs)
    assert not defs.get_repository_def().has_sensor_def("noetl_playbooks")


def test_two_playbooks_of_one_name_and_names_that_dagster_writes_alike(folder: Path) -> None:
    write(folder, a=GOOD)
    (folder / "b.yaml").write_text(text_of("a", GOOD))
    (folder / "c.yaml").write_text(text_of("x-y", GOOD))
    (folder / "d.yaml").write_text(text_of("x_y", GOOD))
    defs = defined(folder)
    assert jobs_of(defs) == {"a", "x_y"}
    assert "a.yaml has the name 'a' already" in why_of(defs)
    assert "c.yaml has the name 'x_y' already" in why_of(defs)


def test_two_playbooks_with_one_asset(folder: Path) -> None:
    text = "workflow:\n  - {step: start, asset: {key: warehouse/patients}, tool: {kind: noop}}\n"
    write(folder, a=text, b=text)
    defs = defined(folder)
    assert jobs_of(defs) == {"a"}
    assert "a.yaml makes the asset warehouse/patients already; give it another key" in why_of(defs)


def test_playbooks_that_read_each_other(folder: Path) -> None:
    write(
        folder,
        a="workflow:\n  - {step: start, from: {x: tests/b/start}, tool: {kind: noop}}\n",
        b="workflow:\n  - {step: start, from: {x: tests/a/start}, tool: {kind: noop}}\n",
        c=GOOD,
    )
    defs = defined(folder)
    assert jobs_of(defs) == {"a", "c"}
    assert "b.yaml: playbooks read each other's assets in a circle: " in why_of(defs)


def test_a_circle_of_playbooks_through_different_assets(folder: Path) -> None:
    write(
        folder,
        a="workflow:\n  - {step: start, tool: {kind: noop}, next: [last]}\n"
        "  - {step: last, from: {x: tests/b/start}, tool: {kind: noop}}\n",
        b="workflow:\n  - {step: start, from: {x: tests/a/start}, tool: {kind: noop}}\n",
    )
    assert jobs_of(defined(folder)) == {"a"}


PYTHON = """
from dagster import AssetKey, AssetSpec, asset, multi_asset

@asset(key=["py", "between"], deps=[AssetKey(["tests", "a", "start"])])
def between(): ...

@multi_asset(specs=[AssetSpec("one", deps=[AssetKey(["tests", "c", "start"])]), AssetSpec("two")])
def several(): ...

@asset(deps=[AssetKey(["tests", "c", "start"]), AssetKey(["py", "between"])])
def after(): ...
"""


def test_a_circle_of_playbooks_through_a_python_asset(folder: Path) -> None:
    write(
        folder,
        a="workflow:\n  - {step: start, from: {x: tests/b/start}, tool: {kind: noop}}\n",
        b="workflow:\n  - {step: start, from: {x: py/between}, tool: {kind: noop}}\n",
        c="workflow:\n  - {step: start, from: {x: two}, tool: {kind: noop}}\n",
        d="workflow:\n  - {step: start, from: {x: after}, tool: {kind: noop}}\n",
    )
    (folder / "circle_assets.py").write_text(PYTHON)
    defs = defined(folder)
    assert jobs_of(defs) == {"a", "d"}
    said = why_of(defs)
    assert "b.yaml: playbooks read each other's assets in a circle: " in said
    assert "asset py/between" in said
    assert "c.yaml: playbooks read each other's assets in a circle: " in said, "what is made as one is one"


def test_a_schedule_that_never_comes(folder: Path) -> None:
    write(folder, a='dagster: {schedules: [{cron: "0 0 31 2 *"}]}\n' + GOOD, b=GOOD)
    defs = defined(folder)
    assert jobs_of(defs) == {"b"}
    assert "0 0 31 2 *" in why_of(defs)


@pytest.mark.parametrize(
    "of_reader",
    [
        '{kind: daily, start: "2026-01-01"}',
        "{static: [x]}",
        "{two: {d: {kind: daily, start: '2026-01-01'}, s: {static: [k]}}}",
    ],
)
@pytest.mark.parametrize("of_read", ["{static: [k, l]}", '{kind: weekly, start: "2026-01-01"}', "{dynamic: some}"])
def test_partitions_of_different_kinds(folder: Path, of_reader: str, of_read: str) -> None:
    write(
        folder,
        a=f"dagster: {{partitions: {of_read}}}\n" + GOOD,
        b=f"dagster: {{partitions: {of_reader}}}\n"
        "workflow:\n  - {step: start, from: {x: tests/a/start}, tool: {kind: noop}}\n",
    )
    defs = defined(folder)
    assert jobs_of(defs) == {"a", "b"}
    assert defs.resolve_asset_graph().get(AssetKey(["tests", "b", "start"])).parent_keys


def test_plumbing_at_the_end_of_a_branch(folder: Path) -> None:
    write(
        folder,
        a="workflow:\n  - {step: start, tool: {kind: noop}, next: [last]}\n"
        "  - {step: last, asset: false, tool: {kind: noop}}\n",
    )
    assert jobs_of(defined(folder)) == {"a"}


def test_a_playbook_that_reads_its_own_older_result(folder: Path) -> None:
    write(folder, a="workflow:\n  - {step: start, from: {before: tests/a/start}, tool: {kind: noop}}\n")
    assert jobs_of(defined(folder)) == {"a"}


def test_a_source_that_two_playbooks_observe_and_one_makes(folder: Path) -> None:
    observe = 'dagster: {observe: [{asset: lake/raw, object: "/lake/*"}, {asset: tests/a/start, object: "/x"}]}\n'
    write(folder, a=observe + GOOD, b=observe + GOOD)
    graph = defined(folder).resolve_asset_graph()
    assert graph.observable_asset_keys == {AssetKey(["lake", "raw"])}


def test_a_playbook_that_makes_an_asset_of_python(folder: Path) -> None:
    write(folder, good=GOOD, twin=GOOD.replace("start,", "start, asset: {key: lake/rows},"))
    (folder / "own_assets.py").write_text("from dagster import asset\n@asset(key=['lake', 'rows'])\ndef rows(): ...\n")
    defs = defined(folder)
    assert jobs_of(defs) == {"good"}
    assert "an asset in Python makes the asset lake/rows already" in why_of(defs)


READER = """
workflow:
  - {step: load, from: {rows: tests/bad/rows}, tool: {kind: noop}, asset: {key: lake/loaded}}
"""


def test_readers_of_a_broken_playbook_stay(folder: Path) -> None:
    write(
        folder,
        bad="workflow:\n  - {step: rows, tool: {kind: nop}}\n  - {step: x, asset: false}\n",
        reader=READER,
    )
    (folder / "own_assets.py").write_text(
        "from dagster import AssetIn, asset\n"
        "@asset(ins={'rows': AssetIn(key=['tests', 'bad', 'rows'], input_manager_key='noetl_results')})\n"
        "def counted(rows): return len(rows)\n"
    )
    defs = defined(folder)
    assert jobs_of(defs) == {"reader"}
    graph = defs.resolve_asset_graph()
    rows = AssetKey(["tests", "bad", "rows"])
    assert graph.get(AssetKey("counted")).parent_keys == graph.get(AssetKey(["lake", "loaded"])).parent_keys == {rows}
    assert "Made by bad.yaml, which cannot be loaded" in str(graph.get(rows).description)
    assert AssetKey(["tests", "bad", "x"]) not in graph.get_all_asset_keys()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "workflow: 3",
        "workflow: [1, {step: [2]}]",
        "workflow: [",
        "metadata: []",
        "metadata: {path: t/bad}\nworkflow: [{step: s, tool: {kind: nop}, asset: {key: /}}]",
        "metadata: {path: t/bad}\nworkflow: [{step: s, tool: {kind: nop}, asset: {key: ['']}}]",
    ],
)
def test_a_broken_playbook_that_says_little(folder: Path, text: str) -> None:
    (folder / "bad.yaml").write_text(f"kind: Playbook\n{text}\n")
    write(folder, good=GOOD)
    assert jobs_of(defined(folder)) == {"good"}
