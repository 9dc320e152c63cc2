"""Run servers of a test's own: its folder, its database, its Dagster instance."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus
from dagster._core.definitions.reconstruct import ReconstructableRepository

from noetl_dagster import embedded
from noetl_dagster.cli.api import choose_partition
from noetl_dagster.code_location.launch import job_origin, prepare
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.launcher.address import PRIORITY_TAG, Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.forking import Message
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings, get_settings
from tests.playbooks import text_of
from tests.waiting import until, until_now

GATED = text_of(
    "gated",
    """
    workload: {gate: "", name: one}
    workflow:
      - step: start
        tool:
          kind: python
          input: {gate: "{{ gate }}", name: "{{ name }}"}
          code: |
            import os, pathlib, time
            os.write(2, b"it has begun")
            pathlib.Path(gate, name + ".begun").write_text(str(os.getpid()))
            while not pathlib.Path(gate, "open").exists():
                time.sleep(0.02)
            result = {"folder": os.getcwd(), "told": os.environ.get("TOLD"), "word": "WORD"}
        next: {arcs: [{step: finish}]}
      - step: finish
        tool: {kind: python, input: {n: "{{ start.word }}"}, code: "result = n"}
    """,
)


@dataclass
class Place:
    """A Dagster instance whose runs go to a run server.

    Attributes:
        gate: folder in which a file ``open`` lets gated steps go on.
    """

    settings: Settings
    instance: DagsterInstance
    playbooks: Path
    gate: Path
    folder: Path

    def write(self, word: str = "first") -> None:
        """The playbook, whose result holds a word."""
        (self.playbooks / "gated.yaml").write_text(GATED.replace("WORD", word))

    def launch(self, name: str = "one", *, priority: int = 0, tags: dict[str, str] | None = None) -> str:
        """Launches a run as the UI, sensors and schedules do; gives its id."""
        playbook = load_playbook(self.playbooks / "gated.yaml")
        noetl = EngineProvider(self.settings)
        plan, job = prepare(playbook, noetl)
        repository = ReconstructableRepository.for_module("noetl_dagster.definitions", "defs")
        run = self.instance.create_run_for_job(
            job_def=job,
            run_id=str(uuid.uuid4()),
            run_config=plan.run_config({"gate": str(self.gate), "name": name}),
            tags={**(tags or {}), **({PRIORITY_TAG: str(priority)} if priority else {})},
            remote_job_origin=job_origin(plan, self.settings),
            job_code_origin=repository.get_reconstructable_job("gated").get_python_origin(),
        )
        self.instance.launch_run(run.run_id, workspace=None)
        return run.run_id

    def open_gate(self) -> None:
        (self.gate / "open").touch()

    def begun(self, name: str = "one") -> int:
        """Waits until a gated step runs; gives the process that runs it."""
        path = self.gate / f"{name}.begun"
        return int(until_now(lambda: path.exists() and path.read_text(), f"{name} to begin"))

    def run(self, run_id: str) -> DagsterRun:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def until(self, run_id: str, status: DagsterRunStatus) -> None:
        def reached() -> bool:
            found = self.run(run_id)
            assert found.status is status or not found.is_finished, f"{found.status}: {self.log()}"
            return found.status is status

        until_now(reached, f"run {run_id} to be {status}; the server said {self.log()}")

    def started(self, run_id: str) -> float:
        record = self.instance.get_run_record_by_id(run_id)
        assert record is not None
        assert record.start_time is not None
        return record.start_time

    def tell(self, message: Message) -> Any:
        """The answer of the run server."""
        return tell(self.folder, message)

    def log(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))


Placed = Callable[..., Any]


def tell(folder: Path, message: Message) -> Any:
    """The answer of the run server that lives in a folder."""
    [path] = folder.glob("*.sock")
    channel = Address(folder, path.stem, {}, 0).connect()
    assert channel is not None
    channel.send(message)
    answer = channel.receive()
    channel.close()
    return answer


@pytest.fixture
def placed(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Placed]:
    """Makes the instance; the server ends with the test."""
    own = settings.model_copy(update={"playbooks_path": tmp_path / "playbooks"})
    for folder in (own.playbooks_path, tmp_path / "gate"):
        folder.mkdir()
    folder = embedded.run_server_folder(own)

    @contextmanager
    def placed(runs_at_once: int = 2) -> Iterator[Place]:
        mine = own.model_copy(update={"runs_at_once": runs_at_once})
        for name, value in embedded.environment(mine).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DAGSTER_HOME", str(embedded.dagster_home(mine)))
        monkeypatch.setenv("TOLD", "by the launcher")
        get_settings.cache_clear()
        with DagsterInstance.get() as instance:
            place = Place(mine, instance, own.playbooks_path, tmp_path / "gate", folder)
            place.write()
            try:
                yield place
            finally:
                place.open_gate()

    yield placed
    monkeypatch.undo()
    get_settings.cache_clear()


def moment() -> None:
    """Long enough for what must not happen."""
    time.sleep(0.3)


@dataclass
class Api:
    """What the API has: an engine, a launcher, a playbook."""

    engine: Engine
    launcher: WarmLauncher
    folder: Path
    address: Address

    async def execute(
        self, name: str, priority: int = 0, runner: Runner = Runner.DAGSTER, file: str = "gated.yaml", **workload: Any
    ) -> int:
        playbook = load_playbook(self.folder / file)
        values = {"gate": str(self.folder), "name": name, **workload}
        partition = choose_partition(playbook, values, None) if playbook.dagster.partitions else None
        execution = await self.engine.lifecycle.create(playbook, values, partition=partition)
        await self.launcher.launch(playbook, execution.id, values, priority, runner)
        return execution.id

    async def begun(self, name: str) -> int:
        path = self.folder / f"{name}.begun"
        return int(await until(lambda: path.exists() and path.read_text(), f"{name} to begin"))

    async def ended(self, execution_id: int) -> Any:
        async def look() -> Any:
            state = (await self.engine.runtime.load(execution_id)).state
            return None if state.is_running else state

        return await until(look, "the end of an execution")

    async def status(self) -> dict[str, Any]:
        channel = await asyncio.to_thread(self.address.connect)
        assert channel is not None
        channel.send({"do": "status"})
        answer = channel.receive()
        channel.close()
        assert answer is not None
        return answer


Serving = Callable[..., AbstractAsyncContextManager[Api]]


@pytest.fixture
def serving(settings: Settings, tmp_path: Path) -> Serving:
    (tmp_path / "gated.yaml").write_text(GATED)

    @asynccontextmanager
    async def serving(runs_at_once: int = 2, **changed: Any) -> AsyncIterator[Api]:
        own = settings.model_copy(update={"playbooks_path": tmp_path, "runs_at_once": runs_at_once, **changed})
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NOETL_")},
            **embedded.environment(own),
            "DAGSTER_HOME": str(embedded.dagster_home(own)),
        }
        address = Address.of(embedded.run_server_folder(own), environment, runs_at_once)
        engine = await Engine.open(own)
        launcher = WarmLauncher(engine, address)
        try:
            yield Api(engine, launcher, tmp_path, address)
        finally:
            (tmp_path / "open").touch()
            await launcher.close()
            await engine.close()

    return serving
