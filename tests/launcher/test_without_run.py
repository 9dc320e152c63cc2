"""Executions without a Dagster run, driven side by side by one process, and what Dagster learns of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from dagster import AssetCheckKey, AssetKey, AssetMaterialization, DagsterInstance, MetadataValue
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from noetl_dagster import embedded
from noetl_dagster.engine.executions.runners import Runner, check_runner
from noetl_dagster.errors import NotDeployedError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.result_ref import REF_METADATA
from noetl_dagster.settings import Settings
from tests.launcher.conftest import Api, Serving
from tests.playbooks import playbook, text_of
from tests.waiting import ended, until

CHECKED = text_of(
    "checked",
    """
    workload: {gate: "", name: one, day: "2026-01-02"}
    dagster: {partitions: {kind: daily, start: "2026-01-01", workload: day}}
    workflow:
      - step: start
        tool: {kind: python, code: "result = [{'n': 1}, {'n': 2}]"}
        checks: [{row_count: 2, name: exact}]
        next: [finish]
      - step: finish
        tool: {kind: python, code: "result = [{'n': 1}]"}
        checks: [{row_count: {min: 2}, name: enough, blocking: true}]
    """,
)

REPORTED = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'execution.reported'"
LOCK = "SELECT pg_advisory_lock(hashtextextended('noetl.dagster_report', 0))"
UNLOCK = "SELECT pg_advisory_unlock(hashtextextended('noetl.dagster_report', 0))"
ADD_RECORD = """
INSERT INTO noetl.event (execution_id, event_id, event_type, meta)
VALUES ($1, 1, 'execution.reported', '{"epoch": 1, "through": 0}')
"""


@pytest.fixture
def instance(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    monkeypatch.setenv("DAGSTER_HOME", str(embedded.dagster_home(settings)))
    with DagsterInstance.get() as opened:
        yield opened


def materialised(instance: DagsterInstance, name: str, step: str) -> list[AssetMaterialization]:
    records = instance.fetch_materializations(AssetKey(["tests", name, step]), limit=100).records
    return [one.asset_materialization for one in records if one.asset_materialization is not None]


def executions_of(instance: DagsterInstance, name: str, step: str) -> list[str]:
    return sorted(str(one.metadata["execution"].value) for one in materialised(instance, name, step))


async def reported(api: Api, execution_id: int) -> None:
    async def look() -> bool:
        return await api.engine.runtime.pool.fetchval(REPORTED, execution_id) == 1

    await until(look, "the report of an execution")
    await until(lambda: api.launcher.running == 0, "the launcher to hold no execution")


async def recoveries(api: Api, execution_id: int) -> int:
    return (await api.engine.runtime.load(execution_id)).state.epoch - 1


async def without_run(api: Api) -> dict[str, Any]:
    return dict((await api.status())["without_run"])


async def test_one_process_drives_many(serving: Serving, instance: DagsterInstance) -> None:
    """One is cancelled beside the others."""
    async with serving(runs_at_once=1) as api:
        executions = [await api.execute(f"n{number}", runner=Runner.ENGINE) for number in range(5)]
        drivers = {await api.begun(f"n{number}") for number in range(5)}
        assert len(drivers) == 1
        assert sorted((await without_run(api))["driven"]) == sorted(map(str, executions))
        assert await api.engine.recovery().abandoned() == []
        cancelled = executions.pop()
        assert await api.engine.lifecycle.cancel(cancelled, "enough")
        state = await api.ended(cancelled)
        assert (state.status, state.error) == (ExecutionStatus.CANCELLED, "enough")
        (api.folder / "open").touch()
        for execution_id in executions:
            state = await api.ended(execution_id)
            assert (state.status, state.run_id, state.epoch) == (ExecutionStatus.COMPLETED, None, 1)
        for execution_id in (*executions, cancelled):
            await reported(api, execution_id)
        assert not [driver for driver in drivers if ended(driver)]
        for step in ("start", "finish"):
            assert executions_of(instance, "gated", step) == sorted(map(str, executions))
        [*_, one] = materialised(instance, "gated", "finish")
        assert one.metadata[REF_METADATA]
        page = f"{api.engine.runtime.settings.server_url}/executions/{one.metadata['execution'].value}/steps/finish"
        assert one.metadata["page"] == MetadataValue.url(page)
        record = instance.get_asset_records([AssetKey(["tests", "gated", "start"])])[0]
        assert record.asset_entry.last_materialization is not None
        assert instance.get_runs_count() == 0


async def test_more_wait_by_priority(serving: Serving) -> None:
    """One that waits is cancelled."""
    async with serving(engine_at_once=1) as api:
        first = await api.execute("first", runner=Runner.ENGINE)
        await api.begun("first")
        low = await api.execute("low", runner=Runner.ENGINE)
        high = await api.execute("high", priority=3, runner=Runner.ENGINE)
        unwanted = await api.execute("unwanted", priority=2, runner=Runner.ENGINE)

        async def all_wait() -> bool:
            return (await without_run(api))["waiting"] == [str(high), str(unwanted), str(low)]

        await until(all_wait)
        assert await api.engine.lifecycle.cancel(unwanted)
        (api.folder / "open").touch()
        for execution_id in (first, high, low):
            assert (await api.ended(execution_id)).status is ExecutionStatus.COMPLETED
        assert (api.folder / "high.begun").stat().st_mtime < (api.folder / "low.begun").stat().st_mtime
        await until(lambda: api.launcher.running == 0)
        assert not (api.folder / "unwanted.begun").exists()


async def test_a_killed_driver_loses_and_doubles_nothing(serving: Serving, instance: DagsterInstance) -> None:
    async with serving() as api:
        executions = [await api.execute(f"n{number}", runner=Runner.ENGINE) for number in range(3)]
        drivers = {await api.begun(f"n{number}") for number in range(3)}
        for number in range(3):
            (api.folder / f"n{number}.begun").unlink()
        [driver] = drivers
        os.kill(driver, signal.SIGKILL)
        assert {await api.begun(f"n{number}") for number in range(3)} != {driver}
        (api.folder / "open").touch()
        for execution_id in executions:
            assert (await api.ended(execution_id)).status is ExecutionStatus.COMPLETED
            await reported(api, execution_id)
            assert await recoveries(api, execution_id) == 1
        for step in ("start", "finish"):
            assert executions_of(instance, "gated", step) == sorted(map(str, executions))


async def test_a_killed_server_leaves_the_driver_going(serving: Serving, instance: DagsterInstance) -> None:
    """If both are killed, the next driver begins again."""
    async with serving() as api:
        one = await api.execute("one", runner=Runner.ENGINE)
        driver, server = await api.begun("one"), (await api.status())["pid"]
        os.kill(server, signal.SIGKILL)
        await until(lambda: ended(server))
        assert not ended(driver)
        (api.folder / "open").touch()
        state = await api.ended(one)
        assert (state.status, state.epoch) == (ExecutionStatus.COMPLETED, 1)
        await reported(api, one)

        (api.folder / "open").unlink()
        two = await api.execute("two", runner=Runner.ENGINE)
        driver = await api.begun("two")
        (api.folder / "two.begun").unlink()
        os.kill((await api.status())["pid"], signal.SIGKILL)
        os.kill(driver, signal.SIGKILL)
        await api.begun("two")
        (api.folder / "open").touch()
        assert (await api.ended(two)).status is ExecutionStatus.COMPLETED
        await reported(api, two)
        assert executions_of(instance, "gated", "start") == sorted(map(str, (one, two)))


async def test_a_driver_that_is_killed_before_it_reports(serving: Serving, instance: DagsterInstance) -> None:
    async with serving() as api:
        (api.folder / "open").touch()
        url = api.engine.runtime.settings.db_url
        blocking = await asyncpg.connect(url)
        await blocking.execute(LOCK)
        execution_id = await api.execute("one", runner=Runner.ENGINE)
        driver = await api.begun("one")
        await api.ended(execution_id)
        await until(lambda: _waits(blocking, "advisory"))
        os.kill(driver, signal.SIGKILL)
        await until(lambda: ended(driver))
        await blocking.execute(UNLOCK)
        await reported(api, execution_id)
        assert executions_of(instance, "gated", "start") == [str(execution_id)]
        assert await recoveries(api, execution_id) == 0
        await blocking.close()


async def test_a_driver_that_is_killed_before_it_records_its_report(
    serving: Serving,
    instance: DagsterInstance,
) -> None:
    async with serving() as api:
        url = api.engine.runtime.settings.db_url
        blocking = await asyncpg.connect(url)
        execution_id = await api.execute("one", runner=Runner.ENGINE)
        driver = await api.begun("one")
        transaction = blocking.transaction()
        await transaction.start()
        await blocking.execute(ADD_RECORD, execution_id)  # the driver's own waits for the end of this transaction
        (api.folder / "open").touch()
        await until(lambda: _waits(blocking, "transactionid"))
        assert executions_of(instance, "gated", "start") == [str(execution_id)]
        os.kill(driver, signal.SIGKILL)
        await until(lambda: ended(driver))
        await transaction.rollback()
        await reported(api, execution_id)
        for step in ("start", "finish"):
            assert executions_of(instance, "gated", step) == [str(execution_id)]
        await blocking.close()


async def _waits(connection: Any, kind: str) -> bool:
    """Whether a session waits for a lock of this kind; from another session, since this one may be in a transaction."""
    found = await connection.fetchval(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND locktype = $1 AND datname = current_database()",
        kind,
    )
    return bool(found)


async def test_a_failed_one_with_checks_and_a_partition(serving: Serving, instance: DagsterInstance) -> None:
    async with serving() as api:
        (api.folder / "checked.yaml").write_text(CHECKED)
        execution_id = await api.execute("one", runner=Runner.ENGINE, file="checked.yaml")
        assert (await api.ended(execution_id)).status is ExecutionStatus.FAILED
        await reported(api, execution_id)
        [start] = materialised(instance, "checked", "start")
        assert start.partition == "2026-01-02"
        assert materialised(instance, "checked", "finish") == []
        found = {}
        for step, name in (("start", "exact"), ("finish", "enough")):
            key = AssetCheckKey(AssetKey(["tests", "checked", step]), name)
            [record] = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
            found[name] = record.status
        assert found == {
            "exact": AssetCheckExecutionRecordStatus.SUCCEEDED,
            "enough": AssetCheckExecutionRecordStatus.FAILED,
        }


def test_a_playbook_that_needs_a_run() -> None:
    flow = playbook("dagster: {pools: {api: 1}}\nworkflow:\n  - {step: start, tool: {kind: noop}, spec: {pool: api}}\n")
    check_runner(flow, Runner.DAGSTER)
    with pytest.raises(NotDeployedError, match=r"step start takes a slot of Dagster's pool 'api'; use the runner"):
        check_runner(flow, Runner.ENGINE)
