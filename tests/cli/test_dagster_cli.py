"""The playbooks of a folder under Dagster's own command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests.forked import run
from tests.playbooks import text_of

Dagster = Callable[..., subprocess.CompletedProcess[str]]

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The playbooks of a code location."""
    folder = tmp_path / "playbooks"
    folder.mkdir()
    return folder


@pytest.fixture
def dagster(
    settings: Settings, environment: dict[str, str], folder: Path, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``dagster`` over the code location of the folder."""
    own = {"NOETL_PLAYBOOKS_PATH": str(folder), "DAGSTER_HOME": str(embedded.dagster_home(settings))}

    def dagster(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = ("dagster", *arguments, "-m", "noetl_dagster.definitions")
        done = run(*given, environment=environment | own, folder=tmp_path, texts=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return dagster


async def test_a_job_runs(dagster: Dagster, folder: Path, pool: asyncpg.Pool, tmp_path: Path) -> None:
    (folder / "squares.yaml").write_text(PLAYBOOK)
    config = {"ops": {"squares_playbook": {"config": {"numbers": [2, 3]}}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    dagster("job", "execute", "-j", "squares", "-c", str(tmp_path / "config.yaml"))
    total = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'total'"
    assert await pool.fetchval(total) == 13
    assert await pool.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'playbook.completed'") == 1
