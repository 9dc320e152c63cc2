"""The playbooks of a folder under Dagster's own command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.playbooks import text_of
from tests.waiting import PROCESS_SECONDS

PLAYBOOK = text_of(
    "squares",
    """
    workload: {numbers: [1, 2, 3, 4]}
    workflow:
      - step: square
        loop: {in: "{{ numbers }}", iterator: n}
        spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 2}}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
        next: [total]
      - step: total
        tool: {kind: python, input: {squares: "{{ square.results }}"}, code: "result = sum(squares)"}
    """,
)


@pytest.mark.parametrize(
    "executor", ["threaded", "in_process", pytest.param("multiprocess", marks=pytest.mark.slow)]
)
async def test_a_job_runs_under_either_executor(
    executor: str,
    settings: Settings,
    environment: dict[str, str],
    pool: asyncpg.Pool,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "squares.yaml").write_text(PLAYBOOK)
    config = {
        "ops": {"squares_playbook": {"config": {"numbers": [2, 3]}}},
        "execution": {"config": {executor: {}}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    job = ["-m", "noetl_dagster.definitions", "-j", "squares", "-c", str(tmp_path / "config.yaml")]
    run = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-m", "dagster", "job", "execute", *job],
        env={
            **environment,
            "NOETL_PLAYBOOKS_PATH": str(folder),
            "DAGSTER_HOME": str(embedded.dagster_home(settings)),
        },
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    total = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'total'"
    assert await pool.fetchval(total) == 13
    assert (
        await pool.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'playbook.completed'") == 1
    )
