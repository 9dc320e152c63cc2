"""``run --partition``, and what ``run`` and ``status`` say of checks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.playbooks import text_of

DAILY = text_of(
    "daily",
    """
    dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}
    workload: {day: null}
    workflow:
      - step: start
        tool: {kind: python, input: {day: "{{ day }}", end: "{{ partition.end }}"}, code: "result = [day, end]"}
        checks:
          - {name: there, when: "{{ output }}"}
          - {name: late, when: "{{ output[0] > '2026-06-01' }}", severity: warn}
    """,
)


def test_an_execution_of_a_partition(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "daily.yaml"
    file.write_text(DAILY)

    refused = cli("run", str(file))
    assert refused.returncode != 0
    assert "playbook daily has partitions: choose one, as with --partition 20" in refused.stderr
    assert "no partition '2025-12-31'; they are from 2026-01-01 to" in (
        cli("run", str(file), "--partition", "2025-12-31").stderr
    )

    ran = cli("run", str(file), "--partition", "2026-01-05", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["workload"] == {"day": "2026-01-05"}
    (step,) = found["steps"]
    assert [(one["name"], one["passed"]) for one in step["checks"]] == [("there", True), ("late", False)]
    by_workload = cli("run", str(file), "--set", "day=2026-01-06")
    assert by_workload.returncode == 0, by_workload.stderr
    assert "late" in by_workload.stdout
    assert "warning" in by_workload.stdout


def test_a_playbook_without_partitions(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(text_of("plain", "workflow:\n  - {step: start, tool: {kind: noop}}\n"))
    refused = cli("run", str(file), "--partition", "2026-01-05")
    assert "playbook plain has no partitions, so it has no partition '2026-01-05'" in refused.stderr
