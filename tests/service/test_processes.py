"""``serve`` and ``worker`` as processes: started in any order, killed and started again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import text_of
from tests.processes import killed_in_the_end
from tests.waiting import until_now

PLAYBOOK = text_of(
    "gated",
    """
    workload: {gate: ""}
    workflow:
      - step: start
        tool:
          kind: python
          input: {gate: "{{ gate }}"}
          code: |
            import pathlib, time
            pathlib.Path(gate, "begun").touch()
            while not pathlib.Path(gate, "open").exists():
                time.sleep(0.05)
            result = 1
    """,
)

Start = Callable[..., "Process"]


class Process:
    """A ``noetl-dagster`` process, and what it has said."""

    def __init__(self, popen: subprocess.Popen[bytes], output: Path) -> None:
        self.popen = popen
        self._output = output

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def until_says(self, pattern: str) -> re.Match[str]:
        return until_now(
            lambda: re.search(pattern, self.said()), f"{pattern} of a process that says {self.said()}"
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``noetl-dagster`` with some arguments."""

    def start(settings: Settings, *arguments: str) -> Process:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NOETL_")}
        output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        with output.open("wb") as written:
            process = start_process(
                [sys.executable, "-m", "noetl_dagster", *arguments],
                env={**environment, **embedded.environment(settings)},
                stdout=written,
            )
        return Process(process, output)

    with killed_in_the_end() as start_process:
        yield start


def test_a_killed_service_starts_again_while_its_runs_go_on(
    settings: Settings, start: Start, tmp_path: Path
) -> None:
    """A run outlives the service that started it, and does not keep the service's port."""
    (tmp_path / "gated.yaml").write_text(PLAYBOOK)
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    first = start(own, "serve", "--port", "0")
    url = first.until_says(r"http://\S+")[0]
    answer = httpx.post(
        f"{url}/api/executions/execute",
        json={"path": "tests/gated", "workload": {"gate": str(tmp_path)}},
        timeout=90,
    )
    execution = f"{url}/api/executions/{answer.json()['execution_id']}"
    until_now((tmp_path / "begun").exists, "the run to begin")
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait()
    second = start(own, "serve", "--port", url.rpartition(":")[2])
    second.until_says("HTTP API on")
    assert httpx.get(execution, timeout=90).json()["status"] == "RUNNING"
    (tmp_path / "open").touch()
    until_now(lambda: httpx.get(execution, timeout=90).json()["status"] == "COMPLETED", "the end of the run")


def test_a_worker_may_be_started_before_the_schema_is_there(settings: Settings, start: Start) -> None:
    asyncio.run(_drop_schema(settings))
    nats = settings.model_copy(update={"event_transport": EventTransport.NATS, "service_port": _free_port()})
    nats = nats.model_copy(update={"server_url": f"http://127.0.0.1:{nats.service_port}"})
    worker = start(nats, "worker", "--id", "early")
    worker.until_says("no schema yet; waiting for 'noetl-dagster serve'")
    start(nats, "serve").until_says("HTTP API on")
    worker.until_says("worker early: 16 slots")


async def _drop_schema(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.db_url)
    await connection.execute("DROP SCHEMA noetl CASCADE")
    await connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
