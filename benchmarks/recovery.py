"""Seconds from the death of a run's process to the first event of the process that resumes it.

The HTTP API watches, with its default settings.

python benchmarks/recovery.py [turns]
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
import httpx

from benchmarks.executions import serving
from noetl_dagster import embedded
from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.launcher.address import stop
from noetl_dagster.settings import Settings

TURNS = 10
PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: slow, path: slow}
workload: {pid: ""}
workflow:
  - step: start
    tool:
      kind: python
      input: {pid: "{{ pid }}"}
      code: "import os, pathlib; pathlib.Path(pid).write_text(str(os.getpid()))"
    next: [work]
  - step: work
    loop: {in: "{{ range(100) | list }}", iterator: n}
    tool: {kind: python, code: "import time; time.sleep(0.05)"}
"""
RESUMED = """
SELECT extract(epoch FROM min(created_at))::float8 FROM noetl.event
WHERE execution_id = $1 AND event_type = 'execution.resumed' AND meta ? 'recovery'
"""
DONE = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'"


async def main(turns: int) -> None:
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as name:
        folder = Path(name)
        (folder / "slow.yaml").write_text(PLAYBOOK)
        settings = embedded.ensure(Settings(home=folder / "home", playbooks_path=folder))
        try:
            with serving(settings) as url:
                await _measure(settings, url, folder, turns)
        finally:
            stop(embedded.run_server_folder(settings))
            embedded.down(settings)


async def _measure(settings: Settings, url: str, folder: Path, turns: int) -> None:
    assert settings.db_url is not None
    connection = await asyncpg.connect(settings.db_url)
    seconds = []
    async with httpx.AsyncClient(base_url=url, timeout=60, headers={CLIENT_HEADER: "benchmark"}) as client:
        for turn in range(turns):
            pid = folder / f"{turn}.pid"
            answer = await client.post("/api/executions/execute", json={"path": "slow", "workload": {"pid": str(pid)}})
            execution = int(answer.raise_for_status().json()["execution_id"])
            while await connection.fetchval(DONE, execution) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            killed = time.time()
            os.kill(int(pid.read_text()), signal.SIGKILL)
            while (resumed := await connection.fetchval(RESUMED, execution)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            seconds.append(resumed - killed)
    await connection.close()
    print(
        f"{turns} runs killed: first new event after {statistics.median(seconds):.1f} s (median), "
        f"{min(seconds):.1f} to {max(seconds):.1f} s"
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS))
