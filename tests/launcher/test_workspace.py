"""The API hands executions to Dagster's own instance: as runs of the jobs of the workspace's code locations."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from dagster import DagsterRun, DagsterRunStatus

from noetl_dagster.cli.api import choose_partition
from noetl_dagster.compiler.plan import plan_playbook
from noetl_dagster.compiler.runs import EXECUTION_TAG, RESUME_EPOCH_TAG, attach, latest_run
from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ExecutionStateError, LaunchError, NotDeployedError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.launcher.address import PRIORITY_TAG
from noetl_dagster.launcher.workspace import Workspace, WorkspaceLauncher
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.service.app import create_app
from noetl_dagster.service.plane import Plane
from noetl_dagster.settings import Settings
from tests.launcher.conftest import Place, Placed
from tests.playbooks import playbook, text_of
from tests.processes import killed_in_the_end
from tests.waiting import PATIENCE_SECONDS, until, until_now


@dataclass
class Api:
    """The HTTP API in this process, on the test's Dagster instance."""

    place: Place
    client: httpx.AsyncClient
    engine: Engine

    async def execute(self, name: str = "one", **more: Any) -> int:
        workload = {"gate": str(self.place.gate), "name": name}
        answer = await self.client.post(
            "/api/executions/execute", json={"path": "tests/gated", "workload": workload, **more}
        )
        assert answer.status_code == 202, answer.text
        return int(answer.json()["execution_id"])

    async def begun(self, name: str = "one") -> int:
        path = self.place.gate / f"{name}.begun"
        return int(await until(lambda: path.exists() and path.read_text(), f"{name} to begin: {self.place.log()}"))

    def run(self, execution_id: int) -> DagsterRun:
        run = latest_run(self.place.instance, execution_id, "gated")
        assert run is not None
        return run

    async def ended(self, execution_id: int) -> Any:
        async def look() -> Any:
            state = (await self.engine.runtime.load(execution_id)).state
            return None if state.is_running else state

        return await until(look, "the end of an execution")


@pytest.fixture
def place(placed: Placed) -> Iterator[Place]:
    with placed() as place:
        yield place


@pytest.fixture
async def api(place: Place, tmp_path: Path) -> AsyncIterator[Api]:
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text("load_from: [{python_module: noetl_dagster.definitions}]\n")
    plane = await Plane.open(
        place.settings,
        lambda engine: WorkspaceLauncher(engine, place.instance, workspace),
        choose_partition,
    )

    class opened:  # noqa: N801 - stands for a context manager function
        async def __aenter__(self) -> Plane:
            return plane

        async def __aexit__(self, *_: object) -> None: ...

    application = create_app(place.settings, opened)
    application.state.plane = plane
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", timeout=90, headers={CLIENT_HEADER: "tests"}
    ) as client:
        yield Api(place, client, plane.engine)
    place.open_gate()
    await plane.close()


async def test_an_execution_becomes_a_run_of_the_code_locations_job(api: Api) -> None:
    execution_id = await api.execute(priority=7)
    pid = await api.begun()
    assert pid != os.getpid()
    run = api.run(execution_id)
    assert run.job_name == "gated"
    assert run.tags[EXECUTION_TAG] == str(execution_id)
    assert run.tags[PRIORITY_TAG] == "7"
    assert run.remote_job_origin is not None
    assert run.run_config["ops"]["gated_playbook"]["config"]["name"] == "one"
    api.place.open_gate()
    state = await api.ended(execution_id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.run_id == run.run_id
    await until(lambda: api.run(execution_id).status is DagsterRunStatus.SUCCESS)

    (api.place.gate / "open").unlink()
    cancelled = await api.execute("two")
    await api.begun("two")
    answer = await api.client.post(f"/api/executions/{cancelled}/cancel", json={"reason": "enough"})
    assert answer.json()["cancelled"]
    await until(lambda: api.run(cancelled).is_finished, "the run of a cancelled execution to end")
    assert api.run(cancelled).status is DagsterRunStatus.CANCELED


def test_an_execution_whose_api_was_killed_before_its_run_was_made_is_resumed(place: Place, tmp_path: Path) -> None:
    workspace, output = tmp_path / "workspace.yaml", tmp_path / "serve.log"
    workspace.write_text("load_from: [{python_module: noetl_dagster.definitions}]\n")
    environment = {**os.environ, "NOETL_RUN_LAUNCHER": "dagster", "NOETL_WORKSPACE": str(workspace)}
    body = {"path": "tests/gated", "workload": {"gate": str(place.gate), "name": "one"}}
    noetl = EngineProvider(place.settings.model_copy(update={"recovery_backoff_seconds": 0.3}))
    with killed_in_the_end() as start, output.open("wb") as written, ThreadPoolExecutor() as threads:
        process = start(
            [sys.executable, "-m", "noetl_dagster", "serve", "--port", "0"], env=environment, stdout=written
        )
        said = re.compile(r"http://127\.0\.0\.1:\d+")
        url = until_now(lambda: said.search(output.read_text()), "serve to answer")[0]
        with no_runs_made(place.settings) as one_waits:
            headers = {CLIENT_HEADER: "tests"}
            asked = threads.submit(httpx.post, f"{url}/api/executions/execute", json=body, headers=headers, timeout=90)
            until_now(one_waits, "the API to make a run")
            os.killpg(process.pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                asked.result(PATIENCE_SECONDS)
    recovery = noetl.engine().recovery()
    [found] = until_now(lambda: noetl.run(recovery.abandoned()), "an execution without a process")
    assert latest_run(place.instance, found.execution_id, "gated") is None
    tags = {EXECUTION_TAG: str(found.execution_id), RESUME_EPOCH_TAG: str(found.epoch)}
    place.open_gate()
    place.until(place.launch(tags=tags), DagsterRunStatus.SUCCESS)
    state = noetl.run(noetl.engine().runtime.load(found.execution_id)).state
    assert state.status is ExecutionStatus.COMPLETED
    close_engines()


@contextmanager
def no_runs_made(settings: Settings) -> Iterator[Callable[[], bool]]:
    """Whoever writes a run of Dagster's waits until the block ends; gives whether somebody does."""
    url = settings.dagster_db_url
    lock = run_sync(asyncpg.connect(url))
    run_sync(lock.execute("BEGIN; LOCK TABLE runs IN EXCLUSIVE MODE"))
    waiting = (
        "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'runs'::regclass "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
    )
    yield lambda: run_sync(lock.fetchval(waiting))
    run_sync(lock.close())


async def test_what_no_code_location_has_is_refused(api: Api) -> None:
    text = text_of("elsewhere", "workflow: [{step: start, tool: {kind: noop}}]")
    assert (await api.client.post("/api/catalog", json={"content": text})).status_code == 201
    answer = await api.client.post("/api/executions/execute", json={"path": "tests/elsewhere"})
    assert answer.status_code == 422
    assert "is no job of the code locations" in answer.json()["detail"]
    assert "reload them" in answer.json()["detail"]
    listed = (await api.client.get("/api/executions")).json()["executions"]
    assert listed == []


async def refused(api: Api) -> tuple[int, str]:
    """Executes what cannot begin; returns the execution, which has failed, and the detail of the answer."""
    before = [one["execution_id"] for one in (await api.client.get("/api/executions")).json()["executions"]]
    answer = await api.client.post("/api/executions/execute", json={"path": "tests/gated"})
    assert answer.status_code == 503, answer.text
    listed = [one["execution_id"] for one in (await api.client.get("/api/executions")).json()["executions"]]
    [new] = set(listed) - set(before)
    state = (await api.engine.runtime.load(int(new))).state
    assert state.status is ExecutionStatus.FAILED
    return int(new), f"{answer.json()['detail']} {state.error}"


async def test_a_run_that_is_not_made_fails_its_execution(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken; or it is queued though its answer is lost; or the database is away while it is made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the cluster has no room")

    async def away(*_: Any) -> None:
        raise asyncpg.InterfaceError("connection is closed")

    with monkeypatch.context() as patched:
        patched.setattr(type(api.place.instance.run_launcher), "launch_run", refuse)
        _, said = await refused(api)
    assert said.count("the cluster has no room") == 2
    with monkeypatch.context() as patched:
        patched.setattr(type(api.place.instance.run_coordinator), "submit_run", refuse)
        execution_id, _ = await refused(api)
    run = api.run(execution_id)
    assert run.status is DagsterRunStatus.FAILURE
    plan = plan_playbook(load_playbook(api.place.playbooks / "gated.yaml"))
    with pytest.raises(ExecutionStateError, match=r"ended before its run began: .*the cluster has no room"):
        await attach(api.engine, api.place.instance, run, plan, plan.regions[0], {})
    with monkeypatch.context() as patched:
        patched.setattr(api.engine.liveness, "hold", away)
        await refused(api)
    with monkeypatch.context() as patched:
        patched.setattr(api.engine.liveness, "release", away)
        patched.setattr("noetl_dagster.launcher.workspace.partition_tags", None)
        await refused(api)


def test_a_known_job_is_found_while_the_code_locations_are_asked_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workspace.yaml"
    path.write_text("load_from: [{python_module: noetl_dagster.definitions}]\n")
    workspace = Workspace(place.instance, path)
    known = plan_playbook(load_playbook(place.playbooks / "gated.yaml"))
    workspace.job_of(known)
    began, answered = threading.Event(), threading.Event()

    def refresh(name: str) -> None:
        began.set()
        assert answered.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(workspace._process, "refresh_code_location", refresh)
    monkeypatch.setattr(workspace, "_refreshed_at", float("-inf"))
    with ThreadPoolExecutor() as threads:
        unknown = plan_playbook(playbook("workflow: [{step: start, tool: {kind: noop}}]"))
        asked = threads.submit(workspace.job_of, unknown)
        assert began.wait(PATIENCE_SECONDS)
        try:
            found = threads.submit(workspace.job_of, known).result(PATIENCE_SECONDS / 2)
        finally:
            answered.set()
        assert found[1].name == "gated"
        with pytest.raises(NotDeployedError):
            asked.result(PATIENCE_SECONDS)
    workspace.close()


async def test_a_workspace_that_is_not_there_says_where_it_was_looked_for(place: Place, tmp_path: Path) -> None:
    engine = await Engine.open(place.settings)
    launcher = WorkspaceLauncher(engine, place.instance, tmp_path / "none.yaml")
    await launcher.connect()
    playbook = load_playbook(place.playbooks / "gated.yaml")
    with pytest.raises(LaunchError, match=r"none\.yaml; set NOETL_WORKSPACE"):
        await launcher.check(playbook)
    await launcher.close()
    await engine.close()
