"""``serve`` and ``worker`` as processes: started in any order, killed and started again."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import asyncpg
import httpx

from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import text_of
from tests.service.conftest import Start
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


def test_a_killed_service_starts_again_while_its_runs_go_on(settings: Settings, start: Start, tmp_path: Path) -> None:
    """A run outlives the service that started it, and does not keep the service's port."""
    (tmp_path / "gated.yaml").write_text(PLAYBOOK)
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    first = start(own, "serve", "--port", "0")
    url = first.until_says(r"http://\S+")[0]
    answer = httpx.post(
        f"{url}/api/executions/execute",
        json={"path": "tests/gated", "workload": {"gate": str(tmp_path)}},
        headers={CLIENT_HEADER: "tests"},
        timeout=90,
    )
    execution = f"{url}/api/executions/{answer.json()['execution_id']}"
    until_now((tmp_path / "begun").exists, "the run to begin")
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait()
    second = start(own, "serve", "--port", url.rpartition(":")[2])
    second.until_says("HTTP API on")
    assert httpx.get(execution, headers={CLIENT_HEADER: "tests"}, timeout=90).json()["status"] == "RUNNING"
    (tmp_path / "open").touch()
    until_now(
        lambda: httpx.get(execution, headers={CLIENT_HEADER: "tests"}, timeout=90).json()["status"] == "COMPLETED",
        "the end of the run",
    )


def test_a_worker_may_be_started_before_the_schema_is_there(settings: Settings, start: Start) -> None:
    asyncio.run(_drop_schema(settings))
    nats = settings.model_copy(update={"event_transport": EventTransport.NATS, "service_port": _free_port()})
    nats = nats.model_copy(update={"server_url": f"http://127.0.0.1:{nats.service_port}"})
    worker = start(nats, "worker", "--id", "early")
    worker.until_says("no schema yet; waiting for 'noetl-dagster provision' or 'serve'")
    start(nats, "serve").until_says("HTTP API on")
    worker.until_says("worker early: pool default, 16 slots")


async def _drop_schema(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.db_url)
    await connection.execute("DROP SCHEMA noetl CASCADE")
    await connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
