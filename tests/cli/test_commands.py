"""What the commands print and the codes they end with."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Cli

GOOD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: sum, path: tests/sum}
workload: {a: 1, b: [2, 3]}
workflow:
  - step: start
    tool: {kind: python, input: {a: "{{ a }}", b: "{{ b }}"}, code: "result = a + sum(b)"}
"""

BROKEN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: broken, path: tests/broken}
workflow:
  - step: start
    tool: {kind: noop}
    next: [nowhere]
"""


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
    assert json.loads(status.stdout)["steps"][0]["status"] == "COMPLETED"

    events = cli("events", found["execution_id"], "--json")
    types = [json.loads(line)["event_type"] for line in events.stdout.splitlines()]
    assert types[0] == "playbook.initialized"
    assert set(types[-2:]) == {"playbook.completed", "workflow.completed"}
    assert types.count("command.issued") == types.count("command.completed") == 1

    listed = cli("executions", "--json")
    assert json.loads(listed.stdout)[0]["execution_id"] == found["execution_id"]


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


def test_a_failed_execution_ends_with_code_1(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD)

    run = cli("run", str(file), "--set", "b=5", "--json")

    assert run.returncode == 1
    found = json.loads(run.stdout)
    assert found["status"] == "FAILED"
    assert "not iterable" in found["error"]


def test_an_unknown_execution_is_named(cli: Cli) -> None:
    status = cli("status", "12345")
    assert status.returncode == 1
    assert "no execution 12345" in status.stderr


def test_a_value_of_the_wrong_type_is_one_line(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sum.yaml"
    file.write_text(GOOD)

    run = cli("run", str(file), "--set", "a=text", "--set", "bb=[1]")

    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "workload of sum" in run.stderr
    assert "did you mean 'b'" in run.stderr
