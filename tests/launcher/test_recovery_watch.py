"""Executions whose process is killed continue within seconds, without Dagster's daemon; living processes keep theirs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from noetl_dagster import embedded
from noetl_dagster.cli.api import recovery_watch
from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.engine.liveness import Liveness, connection_name
from noetl_dagster.engine.recovery.abandoned import ONE_PROCESS, Abandoned, RecoveryWatch, Verdict
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.catalog import Catalog
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import own_worker_id
from tests.launcher.conftest import GATED, Api, Serving
from tests.waiting import until

GRACE = 0.2
RESUMED = """
SELECT meta FROM noetl.event WHERE execution_id = $1 AND event_type = 'execution.resumed' ORDER BY event_id
"""
CUT = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"


@asynccontextmanager
async def watching(api: Api, folder: Path, times: int = 2) -> AsyncIterator[None]:
    """Watches as several services do that share a database."""
    watches = [recovery_watch(api.engine, api.launcher, Catalog(folder), GRACE) for _ in range(times)]
    tasks = [asyncio.create_task(watch.run()) for watch in watches]
    try:
        yield
    finally:
        await cancel_and_wait(*tasks)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


@pytest.mark.parametrize("runner", Runner)
async def test_a_killed_execution_is_resumed_once_as_recovery(serving: Serving, runner: Runner) -> None:
    async with serving(recovery_backoff_seconds=0.5) as api, watching(api, api.folder):
        execution = await api.execute("one", runner=runner)
        kills = 1 if runner is Runner.DAGSTER else 2  # the run server itself resumes executions without a run once
        for _ in range(kills):
            pid = await api.begun("one")
            (api.folder / "one.begun").unlink()
            os.kill(pid, signal.SIGKILL)
        await api.begun("one")
        (api.folder / "open").touch()
        state = await api.ended(execution)
        assert (state.status, state.epoch) == (ExecutionStatus.COMPLETED, 3)
        resumed = [row["meta"].get("recovery") for row in await api.engine.runtime.pool.fetch(RESUMED, execution)]
        assert resumed == ([None, "3"] if runner is Runner.DAGSTER else ["2", "3"]), "a first run opens an epoch too"
        if runner is Runner.DAGSTER:
            assert statuses(api, execution) == [DagsterRunStatus.FAILURE, DagsterRunStatus.SUCCESS]


def statuses(api: Api, execution_id: int) -> list[DagsterRunStatus]:
    """Returns the status of each run of an execution, in the order of their creation."""
    with DagsterInstance.from_config(str(embedded.dagster_home(api.engine.runtime.settings))) as instance:
        found = instance.get_runs(RunsFilter(tags={EXECUTION_TAG: str(execution_id)}), ascending=True)
        return [run.status for run in found]


async def test_executions_of_other_folders_are_left_to_their_sensor(serving: Serving, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    async with serving() as api:
        execution = await api.execute("one")
        os.kill(await api.begun("one"), signal.SIGKILL)
        await until(lambda: api.launcher.running == 0)

        async def undriven() -> bool:
            await Projection(api.engine.runtime.pool).catch_up()
            return execution in await api.engine.liveness.undriven()

        await until(undriven)
        watch = recovery_watch(api.engine, api.launcher, Catalog(elsewhere), GRACE)
        found = await api.engine.recovery().judge(execution, now=2e9, grace=GRACE)
        assert found is not None
        assert found.verdict is Verdict.RESUME
        assert await watch._find(found) is None
        assert await recovery_watch(api.engine, api.launcher, Catalog(api.folder), GRACE)._find(found) is not None


async def test_a_run_that_dies_before_its_first_event_counts(engine: Engine) -> None:
    resumed: list[int] = []

    async def find(one: Abandoned) -> Playbook:
        return (await engine.runtime.load(one.execution_id)).playbook

    async def resume(playbook: Playbook, one: Abandoned) -> None:
        resumed.append(one.epoch)
        await engine.liveness.hold(one.execution_id)

    execution = await engine.lifecycle.create(parse_playbook(GATED), origin={ONE_PROCESS: True})
    watch = RecoveryWatch(engine.runtime, engine.liveness, engine.recovery(), grace=0.001, find=find, resume=resume)

    async def looked_until_resumed() -> bool:
        await watch._look(0.0)
        return bool(resumed)

    await until(looked_until_resumed)
    await watch._look(0.0)  # a process holds it
    await engine.liveness.release(execution.id)
    for _ in range(3):
        await watch._look(0.0)
    assert resumed == [2], "the next one is due after twice the pause"


DAMAGES = [
    "DELETE FROM noetl.event WHERE execution_id = $1 AND event_type = 'playbook.initialized'",
    "UPDATE noetl.event SET meta = '[]' WHERE execution_id = $1 AND event_type = 'playbook.initialized'",
    "UPDATE noetl.event SET meta = '{\"epoch\": \"x\"}' WHERE execution_id = $1 AND event_type = 'playbook.initialized'",
]
"""An execution without a start, without meta, and without an epoch."""


async def test_damaged_executions_do_not_hold_up_the_others(engine: Engine) -> None:
    resumed: list[int] = []

    async def find(one: Abandoned) -> Playbook:
        return (await engine.runtime.load(one.execution_id)).playbook

    async def resume(playbook: Playbook, one: Abandoned) -> None:
        resumed.append(one.execution_id)

    made = [await engine.lifecycle.create(parse_playbook(GATED), origin={ONE_PROCESS: True}) for _ in range(4)]
    *damaged, execution = [one.id for one in made]
    await until(lambda: undriven_are(engine, [*damaged, execution]))
    for execution_id, damage in zip(damaged, DAMAGES, strict=True):
        await engine.runtime.pool.execute(damage, execution_id)
    watch = RecoveryWatch(engine.runtime, engine.liveness, engine.recovery(), grace=0.001, find=find, resume=resume)
    task = asyncio.create_task(watch.run())
    await until(lambda: resumed or task.done())
    assert not task.done()
    assert resumed == [execution]
    await cancel_and_wait(task)


async def undriven_are(engine: Engine, executions: list[int]) -> bool:
    """Reports that these executions, and no others, have no process."""
    await Projection(engine.runtime.pool).catch_up()
    return await engine.liveness.undriven() == executions


async def test_a_living_process_restores_its_lock_when_its_connection_is_cut(
    engine: Engine, settings: Settings
) -> None:
    assert settings.db_url is not None
    liveness = Liveness(settings.db_url, engine.runtime.pool)
    execution = await engine.lifecycle.create(parse_playbook(GATED))
    await until(lambda: undriven_are(engine, [execution.id]))
    await liveness.hold(execution.id)
    assert await engine.liveness.undriven() == []
    for _ in range(2):
        before = liveness._connection
        assert await superuser(settings, CUT, connection_name(own_worker_id())) == 1

        async def restored(before: Any = before) -> bool:
            return liveness._connection is not before and await engine.liveness.undriven() == []

        await until(restored)
    await liveness.close()
    assert await engine.liveness.undriven() == [execution.id]


async def superuser(settings: Settings, statement: str, *values: Any) -> Any:
    """Returns the first value of a statement on the database of a test, with the rights of its owner."""
    connection = await asyncpg.connect(settings.db_url)
    try:
        return await connection.fetchval(statement, *values)
    finally:
        await connection.close()


DRIVEN: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "one process": ({"dagster_run_id": "r", ONE_PROCESS: True}, 0, GRACE),
    "it dies again": ({"dagster_run_id": "r", ONE_PROCESS: True}, 1, None),
    "a process a step": ({"dagster_run_id": "r"}, 0, None),
    "not begun": ({"runner": "engine"}, 0, None),
    "accepted": ({}, 0, None),
}


async def test_only_a_process_that_drives_to_the_end_is_missed_at_once(engine: Engine) -> None:
    backoff = engine.runtime.settings.recovery_backoff_seconds
    for name, (origin, attempts, pause) in DRIVEN.items():
        execution = await engine.lifecycle.create(parse_playbook(GATED), origin=origin if not attempts else {})
        for epoch in range(attempts):
            await engine.lifecycle.resume(execution.id, origin={**origin, "recovery": str(epoch + 2)})
        last = await engine.runtime.pool.fetchval(
            "SELECT extract(epoch FROM max(created_at))::float8 FROM noetl.event WHERE execution_id = $1", execution.id
        )
        patient = await engine.recovery().judge(execution.id, now=last)
        eager = await engine.recovery().judge(execution.id, now=last, grace=GRACE)
        assert patient is not None, name
        assert eager is not None, name
        assert patient.due - last == pytest.approx(backoff * 2**attempts, abs=0.01), name
        assert eager.due - last == pytest.approx(pause or backoff * 2**attempts, abs=0.01), name
        behind = last - 3600
        late = await engine.recovery().judge(execution.id, now=behind)
        assert late is not None, name
        assert late.due <= behind, "a clock that was ahead does not delay the resumption"
