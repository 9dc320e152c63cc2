"""``dagster job launch`` as people type it, with a run server and without."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from noetl_dagster import embedded
from noetl_dagster.launcher.address import LAUNCHER_TAG
from noetl_dagster.settings import Settings
from tests import forked
from tests.launcher.conftest import GATED
from tests.waiting import until_now


@pytest.mark.parametrize("way", ["warm", "default"])
def test_a_launched_job_succeeds(way: str, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "gated.yaml").write_text(GATED)
    (tmp_path / "open").touch()
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    if way == "default":
        embedded.run_server_folder(own).write_text("no folder, so that no run server starts")
    workload = {"gate": str(tmp_path)}
    config = json.dumps({"ops": {"gated_playbook": {"config": workload}}})
    home = embedded.dagster_home(own)
    launched = forked.run(
        *("dagster", "job", "launch", "-m", "noetl_dagster.definitions", "-j", "gated", "--config-json", config),
        environment={**os.environ, **embedded.environment(own), "DAGSTER_HOME": str(home)},
        folder=tmp_path,
        texts=tmp_path,
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    with DagsterInstance.from_config(str(home)) as instance:
        [run] = instance.get_runs()

        def reached() -> bool:
            found = instance.get_run_by_id(run.run_id)
            assert found is not None
            return found.is_finished

        until_now(reached)
        [run] = instance.get_runs()
        assert run.status is DagsterRunStatus.SUCCESS
        assert bool(run.tags[LAUNCHER_TAG]) == (way == "warm")
