"""``run`` and ``resume`` with ``NOETL_WARM_COMMANDS``: a warm process drives, a person waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.launcher.conftest import GATED, tell
from tests.processes import killed_in_the_end
from tests.start.imported import Imported
from tests.start.test_imports import DAGSTER
from tests.waiting import ended, until_now

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(settings: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a folder with a gated playbook."""
    (tmp_path / "gated.yaml").write_text(GATED)
    own = settings.model_copy(update={"warm_commands": True})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}

    with killed_in_the_end() as started:

        def start(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
            return started(
                [sys.executable, *options, "-m", "noetl_dagster", *arguments],
                env={**environment, **embedded.environment(own)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
                # a shell that runs the tests in the background has interrupts ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

        yield start


def run_arguments(folder: Path, name: str) -> list[str]:
    return ["run", "gated.yaml", "--json", "--set", f"gate={folder}", "--set", f"name={name}"]


def begun(folder: Path, name: str) -> int:
    path = folder / f"{name}.begun"
    return int(until_now(lambda: path.exists() and path.read_text(), f"{name} to begin"))


def said(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=120)
    return json.loads(output[output.index("{\n") : output.rindex("\n}") + 2])


def test_a_run_needs_no_dagster_where_it_waits(start: Start, tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    process = start(*run_arguments(tmp_path, "one"), options=("-X", "importtime"))
    account, _ = process.communicate(timeout=120)
    assert process.returncode == 0, account[-3000:]
    Imported.read("run", account).refuse(DAGSTER)
    assert begun(tmp_path, "one") != process.pid


def test_an_interrupted_and_a_killed_run_are_resumed(start: Start, tmp_path: Path) -> None:
    process = start(*run_arguments(tmp_path, "one"))
    driver = begun(tmp_path, "one")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    until_now(lambda: ended(driver), "the interrupted driver to end")
    execution_id = _execution(start)

    (tmp_path / "one.begun").unlink()
    resuming = start("resume", execution_id, "--json")
    os.kill(begun(tmp_path, "one"), signal.SIGKILL)
    assert said(resuming)["status"] == "RUNNING"
    assert resuming.returncode == 1

    (tmp_path / "open").touch()
    again = start("resume", execution_id, "--json")
    found = said(again)
    assert (found["status"], found["epoch"]) == ("COMPLETED", 3)


def test_an_interrupt_is_heard_before_the_run_has_begun(start: Start, settings: Settings, tmp_path: Path) -> None:
    """The driver that has it is stopped, and takes no notice of anything before it goes on."""
    (tmp_path / "open").touch()
    start(*run_arguments(tmp_path, "first")).communicate(timeout=120)
    (tmp_path / "open").unlink()
    folder = embedded.run_server_folder(settings)
    server = psutil.Process(begun(tmp_path, "first")).parent()
    assert server is not None
    drivers = server.children()
    for driver in drivers:
        driver.suspend()
    process = start(*run_arguments(tmp_path, "one"))
    until_now(lambda: tell(folder, {"do": "status"})["driven"], "the run to be given to a driver")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    for driver in drivers:
        driver.resume()
    assert process.wait(120) != 0
    until_now(lambda: not tell(folder, {"do": "status"})["driven"], "the run to end")


def test_a_killed_command_leaves_its_run_going(start: Start, tmp_path: Path) -> None:
    process = start(*run_arguments(tmp_path, "one"))
    driver = begun(tmp_path, "one")
    process.kill()
    process.wait()
    (tmp_path / "open").touch()
    assert psutil.pid_exists(driver)
    execution_id = _execution(start)

    def status() -> str:
        return str(said(start("status", execution_id, "--json"))["status"])

    until_now(lambda: status() == "COMPLETED")


def _execution(start: Start) -> str:
    output, _ = start("executions", "--json").communicate(timeout=120)
    return str(json.loads(output[output.index("[") :])[0]["execution_id"])
