"""``make dev``: Dagster's UI and the pages, started and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from noetl_dagster.embedded.processes import free_ports
from tests.conftest import PROJECT
from tests.waiting import PROCESS_SECONDS, until_now

STAND_IN = """#!/bin/sh
if [ "$1" = services ]; then echo "export DAGSTER_HOME=home"; exit; fi
echo "${0##*/} $* $DAGSTER_HOME" > "$1.txt"
trap 'rm "$1.txt"; exit' TERM
while :; do sleep 0.05; done
"""
"""A program that shows with a file how it was called, until it is asked to end."""


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(PROJECT / "scripts" / "dev", tmp_path / "scripts")
    for name in ("dagster", "noetl-dagster"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(STAND_IN)
        program.chmod(0o755)
    calls = {
        "serve": "noetl-dagster serve --host 127.0.0.1 --port 8701 home\n",
        "dev": "dagster dev -w workspace.yaml -h 127.0.0.1 -p 3000 home\n",
    }
    files = {tmp_path / f"{name}.txt": call for name, call in calls.items()}
    started = subprocess.Popen([script], env=os.environ | {"API_PORT": "8701"}, start_new_session=True)
    try:
        until_now(lambda: all(file.exists() and file.read_text() == call for file, call in files.items()), "both")
    finally:
        os.kill(started.pid, signal.SIGINT)
    assert started.wait(PROCESS_SECONDS) == 0
    assert not any(file.exists() for file in files)


@pytest.mark.slow
@pytest.mark.skipif(not (PROJECT / ".venv").exists(), reason="scripts need .venv")
def test_both_start_and_end_together(environment: dict[str, str], tmp_path: Path) -> None:
    ui, api = free_ports(2, set())
    ports = {"PORT": str(ui), "API_PORT": str(api), "PYTHONPATH": str(PROJECT)}
    with (tmp_path / "shown").open("wb") as shown:
        started = subprocess.Popen(
            [PROJECT / "scripts" / "dev"],
            env=environment | ports,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    addresses = [f"http://127.0.0.1:{ui}/server_info", f"http://127.0.0.1:{api}/executions"]
    try:
        until_now(lambda: started.poll() is not None or all(map(answers, addresses)), "both to answer")
    finally:
        with suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGINT)
        started.wait(PROCESS_SECONDS)
    text = (tmp_path / "shown").read_text()
    assert f"Dagster: http://127.0.0.1:{ui}   executions: http://127.0.0.1:{api}/executions" in text
    assert started.returncode == 0, text
    assert not any(map(answers, addresses))
