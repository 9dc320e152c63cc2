"""Executions of the API, driven by warm processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.cli.api import choose_partition
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.launcher.address import Address
from noetl_dagster.launcher.executions import WarmLauncher
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.settings import Settings
from tests.launcher.conftest import GATED
from tests.waiting import ended, until


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
        launcher = WarmLauncher(engine, address, environment)
        try:
            yield Api(engine, launcher, tmp_path, address)
        finally:
            (tmp_path / "open").touch()
            await launcher.close()
            await engine.close()

    return serving


async def test_they_wait_in_order_and_recovery_leaves_them_alone(serving: Serving) -> None:
    async with serving(runs_at_once=1) as api:
        first = await api.execute("first")
        await api.begun("first")
        low, high = await api.execute("low"), await api.execute("high", priority=3)
        await until(lambda: api.launcher.running == 3)

        async def both_wait() -> bool:
            return (await api.status())["waiting"] == [str(high), str(low)]

        await until(both_wait)
        later = datetime.now(UTC) + timedelta(days=1)
        assert await api.engine.recovery().abandoned(now=later) == []

        (api.folder / "open").touch()
        states = [await api.ended(one) for one in (first, high, low)]
        assert {state.status for state in states} == {ExecutionStatus.COMPLETED}
        runs = [state.run_id for state in states]
        assert len(set(runs)) == 3, "each is a run of its own"
        assert (api.folder / "high.begun").stat().st_mtime < (api.folder / "low.begun").stat().st_mtime
        await until(lambda: api.launcher.running == 0)


async def test_a_killed_server_loses_none(serving: Serving) -> None:
    async with serving(runs_at_once=1) as api:
        executions = [await api.execute(name) for name in ("first", "second", "third")]
        driver = await api.begun("first")
        server = (await api.status())["pid"]
        os.kill(server, signal.SIGKILL)
        await until(lambda: ended(server))
        assert not ended(driver), "what is driven goes on"
        (api.folder / "open").touch()
        for execution_id in executions:
            assert (await api.ended(execution_id)).status is ExecutionStatus.COMPLETED


async def test_one_that_cannot_begin_fails(serving: Serving) -> None:
    async with serving() as api:
        failed = await api.ended(await api.execute("one", gate=["a list"]))
        assert failed.status is ExecutionStatus.FAILED
        assert "the run did not start" in failed.error


async def test_without_a_server_each_gets_a_process(serving: Serving) -> None:
    async with serving() as api:
        api.address.folder.write_text("no folder")
        (api.folder / "open").touch()
        execution_id = await api.execute("one")
        assert (await api.ended(execution_id)).status is ExecutionStatus.COMPLETED
