"""``check`` over many playbooks: the summary, and the formats that programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.cli.commands.check import Findings, ReportFormat, report
from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook.loader import parse_report
from tests.cli.conftest import Cli
from tests.playbooks import text_of

GOOD = text_of("good", "workflow: [{step: start, tool: {kind: python, code: result = 1}}]\n")
DOUBTFUL = text_of("doubtful", 'workflow: [{step: start, tool: {kind: http, url: "{{ nowhere }}"}}]\n')
BROKEN = text_of("broken", "workflow: [{step: start, tool: {kind: python, cod: a}, next: [gone]}]\n")


def findings() -> Findings:
    texts = {"good.yaml": GOOD, "doubtful.yaml": DOUBTFUL, "broken.yaml": BROKEN}
    return {file: parse_report(text, file=file)[1] for file, text in texts.items()}


def test_a_summary_counts_playbooks_and_kinds_of_problems() -> None:
    lines = report(findings(), ReportFormat.TEXT).splitlines()
    assert lines[0] == "good.yaml: ok"
    assert lines[-3:] == [
        "3 playbooks: 1 right, 1 with warnings, 1 with errors",
        "errors: missing-field 1, unknown-field 1, unknown-step 1",
        "warnings: undefined-name 1",
    ]


def test_one_playbook_needs_no_summary() -> None:
    assert report({"good.yaml": []}, ReportFormat.TEXT) == "good.yaml: ok"


def test_workflow_commands_of_github() -> None:
    problem = Problem(Place("a,b.yaml", 3, 5), "50% of\nit: x", "warning", ProblemKind.UNDEFINED_NAME)
    assert report({"a,b.yaml": [problem]}, ReportFormat.GITHUB) == (
        "::warning file=a%2Cb.yaml,line=3,col=5,title=undefined-name::50%25 of%0Ait: x"
    )
    lines = report(findings(), ReportFormat.GITHUB).splitlines()
    assert sum(line.startswith("::error file=broken.yaml,line=") for line in lines) == 3
    assert lines[-3].startswith("3 playbooks: ")


def test_json_is_a_list_of_problems() -> None:
    written = json.loads(report(findings(), ReportFormat.JSON))
    assert [entry["kind"] for entry in written if entry["severity"] == "warning"] == ["undefined-name"]
    assert set(written[0]) == {"file", "line", "column", "severity", "kind", "message"}
    assert json.loads(report({"good.yaml": []}, ReportFormat.JSON)) == []


def test_sarif_has_the_shape_that_its_standard_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = Problem(Place("/elsewhere/a b.yaml", 1), "far away")
    log = json.loads(report({**findings(), "/elsewhere/a b.yaml": [elsewhere]}, ReportFormat.SARIF))
    assert (log["version"], set(log)) == ("2.1.0", {"$schema", "version", "runs"})
    [run] = log["runs"]
    driver = run["tool"]["driver"]
    rules = driver["rules"]
    assert driver["name"] == "noetl-dagster"
    assert [rule["id"] for rule in rules] == [kind.value for kind in ProblemKind]
    assert all(rule["shortDescription"]["text"] for rule in rules)
    assert len(run["results"]) == 5
    for result in run["results"]:
        _check_result(result, rules)
    uris = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]]
    assert uris == [
        "doubtful.yaml",
        "broken.yaml",
        "broken.yaml",
        "broken.yaml",
        "file:///elsewhere/a%20b.yaml",
    ]


def _check_result(result: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    assert set(result) == {"ruleId", "ruleIndex", "level", "message", "locations"}
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["level"] in ("error", "warning")
    assert set(result["message"]) == {"text"}
    [location] = result["locations"]
    assert set(location["physicalLocation"]) == {"artifactLocation", "region"}
    region = location["physicalLocation"]["region"]
    assert region["startLine"] >= 1
    assert region["startColumn"] >= 1


def test_a_folder_is_checked_in_any_format(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "good.yaml").write_text(GOOD)
    (folder / "broken.yaml").write_text(BROKEN)
    text = cli("check", str(folder))
    assert text.returncode == 1
    assert "2 playbooks: 1 right, 0 with warnings, 1 with errors" in text.stdout
    as_json = cli("check", str(folder), "--format", "json")
    assert as_json.returncode == 1
    assert len(json.loads(as_json.stdout)) == 3
    sarif = cli("check", str(folder / "good.yaml"), "--format", "sarif")
    assert sarif.returncode == 0
    assert json.loads(sarif.stdout)["runs"][0]["results"] == []


def test_children_and_credentials_that_no_file_has(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    tasks = "[{name: a, kind: playbook, path: tests/child}, {name: b, kind: playbook, path: tests/chlid}, " + (
        "{name: c, kind: playbook, path: tests/other@2}, {name: d, kind: http, url: x, auth: api}, "
        "{name: e, kind: http, url: x, auth: apu}, {name: f, kind: http, url: x, auth: in_variable}]"
    )
    (tmp_path / "parent.yaml").write_text(text_of("parent", f"workflow: [{{step: a, tool: {tasks}}}]\n"))
    (tmp_path / "child.yaml").write_text(text_of("child", "workflow: [{step: a, tool: {kind: noop}}]\n"))
    (tmp_path / "credentials.yaml").write_text("api: {type: bearer, data: {token: t}}\n")
    environment["NOETL_CREDENTIALS_FILE"] = str(tmp_path / "credentials.yaml")
    environment["NOETL_CREDENTIAL_IN_VARIABLE"] = '{"type": "bearer", "data": {"token": "t"}}'
    lines = cli("check", str(tmp_path / "parent.yaml")).stdout.splitlines()
    assert [line.partition("warning: ")[2] for line in lines] == [
        "no folder has the child playbook 'tests/chlid'; it must have been registered",
        f"{tmp_path / 'credentials.yaml'} has no credential 'apu'; it must be in the database",
    ]
