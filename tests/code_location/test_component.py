"""The component in a project that ``create-dagster`` makes, with the real ``dg``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
import yaml
from dagster import Definitions
from dagster.components import build_defs_for_component

from noetl_dagster import PlaybooksComponent, embedded
from noetl_dagster.settings import Settings
from tests.forked import run
from tests.playbooks import text_of

Tool = Callable[..., str]
BIN = Path(sys.executable).parent
TYPE = "noetl_dagster.PlaybooksComponent"

READS = text_of(
    "report",
    """
    workflow:
      - step: count
        from: {total: clinic/squares/total}
        tool: {kind: python, input: {sum: "{{ total.sum }}"}, code: "result = sum"}
    """,
)


@pytest.fixture
def tool(settings: Settings, tmp_path: Path) -> Tool:
    """Runs ``create-dagster`` and ``dg`` in the project, which appears below the test's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    own = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(BIN.parent),
        "PYTHONPATH": os.pathsep.join(["src", *filter(None, sys.path)]),
        "DAGSTER_HOME": str(embedded.dagster_home(settings)),
        "DG_CLI_CONFIG": str(tmp_path / "dg.toml"),
        "HOME": str(tmp_path),
        "COLUMNS": "200",
        "LAKE_DB_URL": settings.db_url or "",
    }

    def tool(name: str, *arguments: str) -> str:
        project = tmp_path / "project"
        done = run(
            name,
            *arguments,
            environment=inherited | embedded.environment(settings) | own,
            folder=project if project.is_dir() else tmp_path,
            texts=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return tool


@pytest.mark.long
async def test_the_component_in_a_new_project(tool: Tool, tmp_path: Path, pool: asyncpg.Pool) -> None:
    tool("create-dagster", "project", "project", "--no-uv-sync")
    tool("dg", "scaffold", "defs", TYPE, "clinic")
    clinic = tmp_path / "project" / "src" / "project" / "defs" / "clinic"
    described = yaml.safe_load((clinic / "defs.yaml").read_text())
    assert described == {"type": TYPE, "attributes": {"path": "playbooks"}}

    described["attributes"] |= {
        "noetl": {"db_url": {"env": "LAKE_DB_URL"}, "options": {"worker_slots": 4}},
        "exclude": ["drafts/*"],
        "translation": {
            "key": "lake/{{ playbook.name }}/{{ step.name }}",
            "group_name": "g_{{ playbook.name }}",
            "tags": {"tools": "{{ kinds | join('-') }}"},
        },
    }
    described["post_processing"] = {
        "assets": [{"target": "key:lake/squares/total", "attributes": {"owners": ["team:data"]}}]
    }
    (clinic / "defs.yaml").write_text(yaml.safe_dump(described))
    (clinic / "playbooks" / "report.yaml").write_text(READS)
    (clinic / "playbooks" / "drafts").mkdir()
    (clinic / "playbooks" / "drafts" / "draft.yaml").write_text(text_of("draft", "workflow: []\n"))
    tool("dg", "check", "defs")
    listed = json.loads(tool("dg", "list", "defs", "--json"))["assets"]
    assets = {one["asset_key"]: one for one in listed}
    assert set(assets) == {"lake/squares/square", "lake/squares/total", "lake/report/count"}
    assert assets["lake/squares/total"]["owners"] == [{"team": "data"}]
    assert assets["lake/squares/square"]["group_name"] == "g_squares"
    assert assets["lake/squares/square"]["tags"] == [{"key": "tools", "value": "python"}]
    assert assets["lake/squares/square"]["source"].endswith("clinic/playbooks/squares.yaml:22")
    assert assets["lake/report/count"]["dependency_keys"] == ["lake/squares/total"]

    tool("dg", "launch", "--job", "squares")
    tool("dg", "launch", "--job", "report")
    count = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'count'"
    assert await pool.fetchval(count) == 14
    assert not (tmp_path / "project" / ".noetl").exists()  # no process has started servers of its own


def test_two_components_that_say_the_same_share_their_engine(tmp_path: Path) -> None:
    parts = []
    for name, control in (("one", True), ("two", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.yaml").write_text(text_of(name, "workflow: [{step: start, tool: {kind: noop}}]\n"))
        component = PlaybooksComponent(
            path=str(folder), include=[], exclude=[], noetl={"minio_bucket": "lake"}, control=control
        )
        parts.append(build_defs_for_component(component))
    jobs = Definitions.merge(*parts).get_repository_def().get_all_jobs()
    assert {"one", "two"} <= {job.name for job in jobs}
