"""``serve`` and ``worker`` as processes: killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.settings import Settings
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
