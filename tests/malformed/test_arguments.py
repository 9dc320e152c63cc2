"""Arguments of the command line that are missing, unknown or of a wrong type: one message, and exit code 1 or 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from noetl_dagster.cli.app import app
from noetl_dagster.errors import NoetlError
from noetl_dagster.settings import get_settings
from tests.playbooks import text_of

FLOW = text_of("flow", "workload: {n: 1, rows: [1]}\nworkflow: [{step: start, tool: {kind: noop}}]\n")

ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "an unknown command": (["rum"], "rum"),
    "an unknown option": (["run", "flow.yaml", "--fast"], "--fast"),
    "no playbook": (["run"], "playbook"),
    "a missing file": (["run", "nowhere.yaml"], "nowhere.yaml"),
    "a path with a line feed": (["run", "a\nb.yaml"], "b.yaml"),
    "a value without a name": (["run", "flow.yaml", "--set", "1"], "1"),
    "a value of the wrong type": (["run", "flow.yaml", "--set", "n=x"], "n"),
    "an execution that is no number": (["status", "x"], "EXECUTION_ID"),
    "a negative execution": (["status", "--", "-1"], "EXECUTION_ID"),
    "an execution above 63 bits": (["status", "9" * 19], "EXECUTION_ID"),
    "an execution of 400 digits": (["events", "9" * 400], "EXECUTION_ID"),
    "a resumption of nothing": (["resume"], "EXECUTION_ID"),
    "a cancellation of a text": (["cancel", "all"], "EXECUTION_ID"),
    "a format that is none": (["check", "flow.yaml", "--format", "xml"], "xml"),
    "a binary file to check": (["check", "binary.yaml"], "binary.yaml"),
    "an empty folder to check": (["check", "flow.yaml", "empty"], "empty: the folder has no playbooks"),
    "slots that are none": (["worker", "--slots", "many"], "--slots"),
    "no slots": (["worker", "--slots", "0"], "--slots"),
    "a pool that is no name": (["worker", "--pool", "A b"], "A b"),
    "a port that is none": (["serve", "--port", "http"], "--port"),
    "a port above 65535": (["serve", "--port", "65536"], "--port"),
    "a negative port": (["serve", "--port", "-1"], "--port"),
}


@pytest.mark.parametrize(("arguments", "named"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_message_names_the_argument(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOETL_EMBEDDED", "false")
    get_settings.cache_clear()
    (tmp_path / "flow.yaml").write_text(FLOW)
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code in (1, 2), found.output
    assert found.exception is None or isinstance(found.exception, SystemExit | NoetlError), repr(found.exception)
    message = f"{found.output} {found.exception}"
    assert named in message, message
    assert "Traceback" not in message
