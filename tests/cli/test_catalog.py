"""``register``, and what runs from the catalog without its file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.playbooks import text_of

from .conftest import Cli


def text(name: str, code: str) -> str:
    return text_of(name, f'\nworkflow:\n  - step: start\n    tool: {{kind: python, code: "{code}"}}\n')


def test_registered_versions_run_without_their_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    for result in (1, 2):
        file.write_text(text("one", f"result = {result}"))
        assert cli("register", str(file)).stdout == f"tests/one@{result}  registered  {file}\n"
    assert "is already the latest" in cli("register", str(file)).stdout
    file.unlink()

    for reference, version in (("tests/one@1", 1), ("tests/one", 2)):
        run = cli("run", reference, "--json")
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        assert found["steps"][0]["data"] == version
        assert (found["path"], found["version"]) == ("tests/one", version)

    missing = cli("run", "tests/one@7")
    assert missing.returncode == 1
    assert "has no version 7; it has 2, 1" in missing.stderr
    unknown = cli("run", "tests/two")
    assert "'tests/two' is not registered" in unknown.stderr
    assert cli("run", "tests/two.yaml").returncode == 2


def test_a_folder_is_registered_without_what_is_broken(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "good.yaml").write_text(text("good", "result = 1"))
    (folder / "broken.yaml").write_text(text("broken", "result = ("))
    for name in ("twin_a", "twin_b"):
        (folder / f"{name}.yaml").write_text(text("twin", "result = 1"))
    (folder / "other.yaml").write_text("some: thing\n")

    done = cli("register", str(folder), "--json")

    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [(one["path"], one["version"], one["new"]) for one in report["registered"]] == [("tests/good", 1, True)]
    assert len(report["refused"]) == 2
    assert f"{folder / 'broken.yaml'}:" in done.stderr
    assert "have the same metadata.path 'tests/twin'" in done.stderr
    assert cli("register", str(tmp_path / "nothing")).returncode == 2


LENIENT = text_of(
    "foreign",
    """
    workflow:
      - step: start
        tool: {kind: python, cods: a = 1, code: "import pathlib; result = pathlib.Path('mended').exists()"}
        next: [{step: far, when: "{{ not result }}"}]
      - step: far
        tool: {kind: quantum, command: "{{ nowhere }}"}
    """,
)
WARNINGS = [
    "line 7: step 'start': python has no field 'cods'; did you mean 'code'?",
    "line 10: step 'far': tool kind 'quantum' is not supported; supported: ",
]


def assert_shown(warnings: list[str]) -> None:
    assert [found.startswith(text) for found, text in zip(warnings, WARNINGS, strict=True)] == [True, True]


def test_a_lenient_playbook_stays_lenient(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_text(LENIENT)
    for command in ("run", "register"):
        strict = cli(command, str(file))
        assert strict.returncode == 1
        assert "python has no field 'cods'" in strict.stderr

    run = cli("run", str(file), "--lenient", "--json")
    found = json.loads(run.stdout)
    assert found["status"] == "FAILED"
    assert "tool kind 'quantum' is not supported; supported: artifact" in found["error"]
    assert_shown(found["warnings"])
    registered = json.loads(cli("register", str(file), "--lenient", "--json").stdout)
    assert_shown(registered["registered"][0]["warnings"])
    file.unlink()
    (tmp_path / "mended").touch()
    again = json.loads(cli("run", "tests/foreign", "--json").stdout)
    assert (again["status"], again["version"]) == ("COMPLETED", 1)
    assert_shown(again["warnings"])
    assert f"warning: {WARNINGS[0]}" in cli("status", again["execution_id"]).stdout.replace("\n", " ")
