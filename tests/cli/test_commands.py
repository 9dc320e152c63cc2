"""What the commands print and the codes they end with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.playbooks import text_of

from .conftest import Cli

GOOD = text_of(
    "sum",
    """
    workload: {a: 1, b: [2, 3]}
    workflow:
      - step: start
        tool: {kind: python, input: {a: "{{ a }}", b: "{{ b }}"}, code: "result = a + sum(b)"}
    """,
)

BROKEN = text_of(
    "broken",
    """
    workflow:
      - step: start
        tool: {kind: noop}
        next: [nowhere]
    """,
)


def test_run_status_and_events(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD)

    run = cli("run", str(file), "--set", "a=10", "--set", "b=[1, 2]", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["status"] == "COMPLETED"
    assert found["workload"] == {"a": 10, "b": [1, 2]}
    assert found["run_id"]

    status = cli("status", found["execution_id"], "--json")
    assert json.loads(status.stdout)["steps"] == found["steps"]
    assert found["steps"][0]["status"] == "COMPLETED"

    events = cli("events", found["execution_id"], "--json")
    types = [json.loads(line)["event_type"] for line in events.stdout.splitlines()]
    assert types[0] == "playbook.initialized"
    assert set(types[-2:]) == {"playbook.completed", "workflow.completed"}
    assert types.count("command.issued") == types.count("command.completed") == 1

    listed = cli("executions", "--json")
    assert json.loads(listed.stdout)[0]["execution_id"] == found["execution_id"]

    again = cli("resume", found["execution_id"])
    assert (again.returncode, "is COMPLETED" in again.stderr) == (1, True), again.stderr


def test_run_without_a_dagster_run(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD)
    run = cli("run", str(file), "--set", "a=10", "--runner", "engine", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["status"], found["run_id"]) == ("COMPLETED", None)
    events = cli("events", found["execution_id"], "--json")
    assert json.loads(events.stdout.splitlines()[-1])["event_type"] == "execution.reported"
    unknown = cli("run", str(file), "--runner", "airflow")
    assert unknown.returncode == 2
    assert "'airflow' is not one of" in unknown.stderr


def test_a_broken_playbook_is_refused_with_its_place(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)

    check = cli("check", str(file))
    assert check.returncode == 1
    assert f"{file}:8:" in check.stdout
    assert "nowhere" in check.stdout

    run = cli("run", str(file))
    assert run.returncode == 1
    assert "nowhere" in run.stderr


TABLE = text_of(
    "table",
    """
    workflow:
      - step: small
        tool: {kind: python, code: "result = {'rows': [1, 2]}"}
        next: [long]
      - step: long
        tool: {kind: python, code: "result = 'x' * 200"}
        next: [square]
      - step: square
        loop: {in: [1, 2, 3], iterator: n}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
        next: [stored]
      - step: stored
        loop: {in: [1, 0], iterator: n}
        spec: {allow_partial: true}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / n", spec: {result: {store: disk}}}
        next: [nothing]
      - step: nothing
        loop: {in: [], iterator: n}
        tool: {kind: noop}
        next: [two]
      - step: two
        tool:
          - {name: first, kind: python, code: "result = 1"}
          - {name: last, kind: python, code: "result = [2]", spec: {result: {store: disk}}}
        next: [broken]
      - step: broken
        loop: {in: "{{ 5 }}", iterator: n}
        tool: {kind: noop}
    """,
)


def test_table_and_json_show_small_results_and_references_of_stored_ones(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(TABLE)

    run = cli("run", str(file))

    assert run.returncode == 1
    rows = {line.split()[0]: line.rstrip() for line in run.stdout.splitlines() if line.strip()}
    assert rows["small"].endswith('{"rows": [1, 2]}')
    assert rows["long"].endswith("xxx…")
    assert rows["square"].split(maxsplit=3)[2:] == ["3/3", "[1, 4, 9]"]
    assert rows["stored"].split(maxsplit=5)[2:5] == ["1/2,", "1", "failed"]
    assert rows["stored"].split(maxsplit=5)[5].startswith('["file://')
    assert rows["nothing"].split()[2:] == ["0/0", "[]"]
    assert rows["two"].split()[2].startswith("file://")
    assert run.stdout.count("which is not a list") == 1
    assert run.stdout.count("step broken") == 1

    [listed] = json.loads(cli("executions", "--json").stdout)
    assert f"running table, execution {listed['execution_id']}" in run.stderr
    found = json.loads(cli("status", listed["execution_id"], "--json").stdout)
    assert found["status"] == "FAILED"
    steps = {step["step"]: step for step in found["steps"]}
    assert steps["small"]["data"] == {"rows": [1, 2]}
    assert steps["small"]["ref"] is None
    assert steps["square"]["data"] == [1, 4, 9]
    assert steps["nothing"]["data"] == []
    stored, failed = steps["stored"]["data"]
    assert stored["ref"]["physical_uri"].startswith("file://")
    assert failed["status"] == "error"
    assert failed["error"]["kind"] == "python"
    assert steps["two"]["data"] is None
    assert steps["two"]["ref"]["physical_uri"] == steps["two"]["result"]
    assert steps["two"]["ref"]["preview"] == "[2]"


def test_code_that_does_not_compile_is_found_before_it_runs(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD.replace("a + sum(b)", "a + sum(b"))

    check, run = cli("check", str(file)), cli("run", str(file))

    place = f"{file}:8:"
    assert check.returncode == run.returncode == 1
    assert check.stdout.startswith(place), check.stdout
    assert "'(' was never closed" in check.stdout
    assert run.stderr.startswith(place), run.stderr
    assert ": warning: code: '(' was never closed" in run.stderr


def test_what_check_warns_of_is_said_before_a_run_too(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD.replace("workload:", "spec: {entry_step: start}\nworkload:", 1))

    check, run = cli("check", str(file)), cli("run", str(file), "--json")

    assert check.returncode == run.returncode == 0
    warning = check.stdout.strip()
    assert "'entry_step' has no effect" in warning
    assert warning in run.stderr
    assert json.loads(run.stdout)["status"] == "COMPLETED"


def test_an_unknown_execution_is_named(cli: Cli) -> None:
    status = cli("status", "12345")
    assert status.returncode == 1
    assert "no execution 12345" in status.stderr


@pytest.mark.parametrize(
    ("value", "message", "code"),
    [
        ("text", "workload.a is the text 'text', but its default is an integer", 1),
        ("12345678901234567890123", "neither a 64-bit integer nor a double holds it; quote it if text is meant", 2),
    ],
    ids=["type", "size"],
)
def test_a_wrong_value_is_one_line(cli: Cli, tmp_path: Path, value: str, message: str, code: int) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD)

    run = cli("run", str(file), "--set", f"a={value}", "--set", "bb=[1]")

    assert run.returncode == code
    assert "Traceback" not in run.stderr
    assert message in run.stderr
    assert ("no key 'bb'; keys of the workload: a, b" in run.stderr) is (code == 1)


def test_verify_ends_with_2_if_nothing_could_be_checked(cli: Cli, environment: dict[str, str]) -> None:
    assert cli("verify", "--all").returncode == 0
    for arguments in ([], ["5", "--all"], ["5"]):
        assert cli("verify", *arguments).returncode == 2
    environment["NOETL_DB_URL"] += "_elsewhere"
    refused = cli("verify", "--all")
    assert refused.returncode == 2
    assert "nothing was checked: the event log refuses the connection" in refused.stderr
