"""Executions of the API, driven by warm processes."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.errors import LaunchError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import load_playbook
from tests.launcher.conftest import Serving
from tests.waiting import until


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


async def test_one_that_cannot_begin_fails(serving: Serving) -> None:
    async with serving() as api:
        playbook = load_playbook(api.folder / "gated.yaml")
        execution = await api.engine.lifecycle.create(playbook)
        await api.launcher.launch(playbook, execution.id, {"gate": ["a list"]}, 0, Runner.DAGSTER)
        failed = await api.ended(execution.id)
        assert failed.status is ExecutionStatus.FAILED
        assert "the run did not start" in failed.error


async def test_without_a_server_they_are_left_to_the_recovery(serving: Serving) -> None:
    async with serving(runs_at_once=1) as api:
        first, second = [await api.execute(name) for name in ("first", "second")]
        await api.begun("first")
        folder, server = api.address.folder, (await api.status())["pid"]
        folder.rename(folder.with_name("before"))
        folder.write_text("no folder")
        os.kill(server, signal.SIGKILL)

        async def is_released() -> bool:
            return not await api.engine.liveness.is_driven(second)

        await until(is_released, "the launcher to give up")
        assert await api.engine.liveness.is_driven(first), "its driver lives on"

        with pytest.raises(LaunchError, match="File exists"):
            await api.execute("third")

        folder.unlink()
        (api.folder / "open").touch()
        found = await api.engine.recovery().abandoned(now=datetime.now(UTC) + timedelta(days=1))
        [abandoned] = [one for one in found if one.execution_id == second]
        await api.launcher.recover(load_playbook(api.folder / "gated.yaml"), abandoned)
        assert (await api.ended(second)).status is ExecutionStatus.COMPLETED
