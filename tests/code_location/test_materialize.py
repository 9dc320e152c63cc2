"""``materialize_playbook``: a playbook run here and now, its results at hand."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.code_location.materialize import materialize_playbook
from noetl_dagster.errors import ExecutionFailedError, PlaybookError, WorkloadError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.resources.engines import EngineProvider
from tests.playbooks import playbook, text_of

SQUARES = """
workload: {numbers: [1, 2, 3]}
workflow:
  - step: square
    loop: {in: "{{ numbers }}", iterator: n}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
    next: [total]
  - step: total
    tool: {kind: python, input: {all: "{{ square.results }}"}, code: "result = {'sum': sum(all)}"}
    checks: [{name: some, when: "{{ output.sum > 100 }}"}]
"""
NOOP = "workflow: [{step: start, tool: {kind: noop}}]\n"
DAILY = """
dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}
workload: {day: null}
workflow:
  - {step: load, tool: {kind: python, input: {day: "{{ day }}"}, code: "result = {'day': day}"}}
"""


def test_a_file(noetl: EngineProvider, tmp_path: Path) -> None:
    file = tmp_path / "squares.yaml"
    file.write_text(text_of("squares", SQUARES))
    made = materialize_playbook(file, {"numbers": [3, 4]}, resources={"noetl": noetl})
    assert made.success
    assert made.asset_value("total") == {"sum": 25}
    assert made.asset_value(AssetKey(["tests", "squares", "total"])) == {"sum": 25}
    assert made.asset_value("tests/squares/square") == [9, 16]
    assert [one.asset_key.path[-1] for one in made.materializations] == ["square", "total"]
    assert [(one.check_name, one.passed) for one in made.check_evaluations] == [("some", False)]
    assert made.overview().status == ExecutionStatus.COMPLETED
    with pytest.raises(KeyError, match="makes no asset 'cube'; its steps: square, total"):
        made.asset_value("cube")


def test_a_table(noetl: EngineProvider) -> None:
    table = playbook("workflow: [{step: rows, tool: {kind: duckdb, command: 'SELECT range AS n FROM range(20000)'}}]")
    made = materialize_playbook(table, resources={"noetl": noetl})
    value = made.asset_value("rows")
    rows = value if isinstance(value, pa.Table) else value["rows"]
    assert len(rows) == 20_000


def test_a_failure_is_raised(noetl: EngineProvider) -> None:
    fails = playbook("workflow: [{step: fall, tool: {kind: python, code: \"raise ValueError('gone')\"}}]")
    with pytest.raises(ExecutionFailedError, match=r"sample, execution \d+: .*fall"):
        materialize_playbook(fails, resources={"noetl": noetl})
    made = materialize_playbook(fails, resources={"noetl": noetl}, raise_on_error=False)
    assert not made.success
    assert "gone" in str(made.error)
    with pytest.raises(KeyError, match=r"step fall of execution \d+ has not completed"):
        made.asset_value("fall")


def test_a_partition(noetl: EngineProvider) -> None:
    made = materialize_playbook(playbook(DAILY), partition="2026-01-31", resources={"noetl": noetl})
    assert made.asset_value("load") == {"day": "2026-01-31"}
    assert [one.partition for one in made.materializations] == ["2026-01-31"]
    made = materialize_playbook(playbook(DAILY), {"day": date(2026, 1, 30)}, resources={"noetl": noetl})
    assert made.asset_value("load") == {"day": "2026-01-30"}
    with pytest.raises(WorkloadError, match=r"workload\.day"):
        materialize_playbook(playbook(DAILY), {"day": object()}, resources={"noetl": noetl})
    with pytest.raises(WorkloadError, match="1999"):
        materialize_playbook(playbook(DAILY), partition="1999-01-01", resources={"noetl": noetl})


def test_an_instance_of_ones_own(noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    made = materialize_playbook(
        playbook(SQUARES), resources={"noetl": noetl}, instance=dagster_instance, tags={"why": "test"}
    )
    run = dagster_instance.get_run_by_id(made.run_id)
    assert run is not None
    assert run.tags["why"] == "test"


def test_mistakes_are_told_at_once(noetl: EngineProvider, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text_of("bad", "workflow: []\n"))
    with pytest.raises(PlaybookError, match=r"bad\.yaml"):
        materialize_playbook(file, resources={"noetl": noetl})
    with pytest.raises(WorkloadError, match="n"):
        materialize_playbook(playbook("workload: {n: 1}\n" + NOOP), {"n": "many"}, resources={"noetl": noetl})


def test_a_run_that_fails_before_its_first_step_shows_the_error_itself(noetl: EngineProvider) -> None:
    steps = 'workflow: [{step: start, spec: {timeout: "{{ workload.seconds }}"}, tool: {kind: noop}}]'
    flow = playbook(f"workload: {{seconds: null}}\n{steps}")

    made = materialize_playbook(flow, {"seconds": "soon"}, resources={"noetl": noetl}, raise_on_error=False)

    assert str(made.error).startswith("PlaybookError: "), made.error
    assert "soon" in str(made.error)


BESIDE = """
from dagster import AssetCheckResult, AssetKey, asset, asset_check

@asset_check(asset=AssetKey(["tests", "squares", "total"]))
def is_even():
    return AssetCheckResult(passed=False, metadata={"asked": "beside"})

@asset
def other(): ...

@asset_check(asset=other)
def of_another(): return AssetCheckResult(passed=True)
"""


def test_checks_in_python_beside_a_playbook_run_with_it(noetl: EngineProvider, tmp_path: Path) -> None:
    (tmp_path / "squares.yaml").write_text(text_of("squares", SQUARES))
    (tmp_path / "squares_beside_assets.py").write_text(BESIDE)
    (tmp_path / "slow_assets.py").write_text("raise RuntimeError('has no checks and is not imported')")
    here = EngineProvider(noetl.settings.model_copy(update={"playbooks_path": tmp_path}))
    try:
        made = materialize_playbook(tmp_path / "squares.yaml", resources={"noetl": here})
    finally:
        here.close()
    said = {one.check_name: one.passed for one in made.check_evaluations}
    assert said == {"some": False, "is_even": False}


def test_a_check_of_a_partition(noetl: EngineProvider) -> None:
    checked = DAILY.replace("{step: load,", "{step: load, checks: [{name: known, when: '{{ output.day }}'}],")
    made = materialize_playbook(playbook(checked), partition="2026-01-31", resources={"noetl": noetl})
    assert [(one.passed, one.partition) for one in made.check_evaluations] == [(True, "2026-01-31")]


def test_rows_that_are_no_mappings(noetl: EngineProvider) -> None:
    columnar = "result = {'columns': ['a', 'b'], 'rows': [[1, 2], [3, 4]], 'row_count': 2}"
    flow = playbook(f'workflow: [{{step: rows, tool: {{kind: python, code: "{columnar}"}}}}]')
    made = materialize_playbook(flow, resources={"noetl": noetl})
    assert made.asset_value("rows")["rows"] == [[1, 2], [3, 4]]
    assert "dagster/row_count" not in made.materializations[0].metadata
