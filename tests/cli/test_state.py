"""``noetl-dagster state``: how far steps have loaded, shown and set by hand."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.playbooks import text_of

NUMBERS = text_of(
    "numbers",
    """
    workload: {new: [1, 2]}
    workflow:
      - step: load
        state: {key: n, initial: 0}
        tool:
          kind: python
          input: {new: "{{ new }}", since: "{{ state.value }}"}
          code: "result = [{'n': n} for n in new if n > since]"
    """,
)


def test_how_far_it_is(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "numbers.yaml"
    file.write_text(NUMBERS)
    assert "tests/numbers has not loaded anything" in cli("state", "show", "tests/numbers").stdout
    refused = cli("state", "reset", "tests/numbers", "load")
    assert refused.returncode == 1
    assert "has not loaded anything as 'load'; it has loaded: nothing" in refused.stderr

    early = cli("state", "set", "tests/numbers", "lod", "1")
    assert (early.returncode, "is not registered and has not run" in early.stderr) == (0, True), early.stderr
    assert "load starts again" not in cli("state", "reset", "tests/numbers", "lod").stdout

    ran = cli("run", str(file))
    assert "load has loaded up to 2, from 0" in ran.stdout, ran.stderr
    shown = cli("state", "show", "tests/numbers", "--json")
    [found] = [one for one in json.loads(shown.stdout) if one["name"] == "load"]
    assert (found["value"], found["previous"]) == (2, 0)
    assert found["execution_id"] is not None

    misspelt = cli("state", "set", "tests/numbers", "laod", "7")
    assert misspelt.returncode == 1
    assert "playbook tests/numbers stores no state as 'laod'; it stores: load" in misspelt.stderr
    assert "load continues from 7; it was 2" in cli("state", "set", "tests/numbers", "load", "7").stdout
    assert "hand" in cli("state", "show", "tests/numbers").stdout
    wrong = cli("state", "set", "tests/numbers", "load", "2026-01-01")
    assert (wrong.returncode, "cannot be compared" in wrong.stderr) == (1, True), wrong.stderr
    ran = cli("run", str(file), "--json", "--set", "new=[6, 8]")
    (step,) = json.loads(ran.stdout)["steps"]
    assert (step["data"], step["watermark"]) == ([{"n": 8}], {"value": 8, "previous": 7})

    assert "load starts again; it was 8" in cli("state", "reset", "tests/numbers", "load").stdout
    ran = cli("run", str(file), "--json")
    (step,) = json.loads(ran.stdout)["steps"]
    assert (step["data"], step["watermark"]) == ([{"n": 1}, {"n": 2}], {"value": 2, "previous": 0})
