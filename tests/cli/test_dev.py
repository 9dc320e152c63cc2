"""``make dev``: Dagster's UI and the pages, started and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from noetl_dagster.embedded.processes import free_ports
from tests.conftest import PROJECT
from tests.waiting import PROCESS_SECONDS, until_now

pytestmark = [pytest.mark.long, pytest.mark.skipif(not (PROJECT / ".venv").exists(), reason="scripts need .venv")]


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


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
