"""Runs that Dagster launches, driven by warm processes."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from dagster import AssetKey, DagsterRun, DagsterRunStatus, SensorResult, build_sensor_context

from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.compiler.runs import EXECUTION_TAG, RESUME_EPOCH_TAG
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.abandoned import Verdict
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.launcher.address import LAUNCHER_TAG, stamp_of
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.settings import Settings
from tests.launcher.conftest import Place, Placed, moment
from tests.waiting import ended, until, until_now


def results(settings: Settings, execution_id: int) -> dict[str, object]:
    async def read() -> dict[str, object]:
        engine = await Engine.open(settings)
        try:
            state = (await engine.runtime.load(execution_id)).state
            start = state.latest.get("start")
            return {"status": state.status, "start": start and start.envelope["data"]}
        finally:
            await engine.close()

    return run_sync(read())


def health(place: Place, run: DagsterRun) -> str:
    """What run monitoring is told."""
    assert place.instance.run_launcher.supports_check_run_worker_health
    return place.instance.run_launcher.check_run_worker_health(run).status.value


def execution_of(place: Place, run_id: str) -> int:
    return int(until_now(lambda: place.run(run_id).tags.get(EXECUTION_TAG), "the run's execution"))


def test_runs_have_the_environment_and_the_folder_and_the_playbook_as_it_is_now(placed: Placed) -> None:
    """One driver takes one run after another until the playbook changes."""
    with placed(runs_at_once=1) as place:
        place.open_gate()
        first = place.launch()
        place.until(first, DagsterRunStatus.SUCCESS)
        assert place.run(first).tags[LAUNCHER_TAG]
        key = AssetKey(load_playbook(place.playbooks / "gated.yaml").asset_key("finish"))
        assert place.instance.get_latest_materialization_event(key) is not None
        said = [path.read_text() for path in Path(os.environ["DAGSTER_HOME"]).rglob("*.err")]
        assert any("it has begun" in text for text in said)
        driver = place.begun()

        (place.gate / "one.begun").unlink()
        place.until(place.launch(), DagsterRunStatus.SUCCESS)
        assert place.begun() == driver

        place.write("second")
        (place.gate / "one.begun").unlink()
        second = place.launch()
        place.until(second, DagsterRunStatus.SUCCESS)
        assert place.begun() != driver  # which had compiled the playbook as it was

        found = results(place.settings, execution_of(place, second))
        assert found["status"] is ExecutionStatus.COMPLETED
        assert found["start"] == {"folder": str(Path.cwd()), "told": "by the launcher", "word": "second"}


def test_a_running_run_is_terminated_with_its_execution(placed: Placed) -> None:
    with placed() as place:
        run_id = place.launch()
        driver = place.begun()
        assert place.instance.run_launcher.terminate(run_id)
        place.until(run_id, DagsterRunStatus.CANCELED)
        found = until_now(lambda: results(place.settings, execution_of(place, run_id)))
        assert found["status"] is ExecutionStatus.CANCELLED
        until_now(lambda: ended(driver), "an interrupted driver to end")
        assert not place.instance.run_launcher.terminate(run_id)


def test_no_more_than_the_bound_are_driven_and_the_rest_goes_by_priority(placed: Placed) -> None:
    with placed(runs_at_once=1) as place:
        first = place.launch("first")
        place.begun("first")
        low, high = place.launch("low"), place.launch("high", priority=5)
        unwanted = place.launch("unwanted", priority=1)
        status = place.tell({"do": "status"})
        assert status["driven"] == [first]
        assert status["waiting"] == [high, unwanted, low]
        assert place.run(low).status is DagsterRunStatus.STARTING
        assert [health(place, place.run(run_id)) for run_id in (first, low)] == ["RUNNING", "RUNNING"]
        assert place.instance.run_launcher.terminate(unwanted)
        assert place.run(unwanted).status is DagsterRunStatus.CANCELED
        moment()
        assert place.tell({"do": "status"})["driven"] == [first]

        place.open_gate()
        for run_id in (first, low, high):
            place.until(run_id, DagsterRunStatus.SUCCESS)
        assert place.started(first) < place.started(high) < place.started(low)
        assert not (place.gate / "unwanted.begun").exists()


def test_a_killed_driver_fails_its_run_and_the_execution_is_resumed(placed: Placed) -> None:
    with placed() as place:
        run_id = place.launch()
        driver, before = place.begun(), place.run(run_id)
        assert health(place, before) == "RUNNING"
        os.kill(driver, signal.SIGKILL)
        until_now(lambda: health(place, before) == "NOT_FOUND")
        place.until(run_id, DagsterRunStatus.FAILURE)
        execution_id = execution_of(place, run_id)
        place.open_gate()

        async def recover() -> ExecutionStatus:
            engine = await Engine.open(place.settings)
            try:
                later = datetime.now(UTC) + timedelta(days=1)
                # PostgreSQL hears of the death a moment later
                [abandoned] = await until(lambda: engine.recovery().abandoned(now=later))
                assert (abandoned.execution_id, abandoned.verdict) == (execution_id, Verdict.RESUME)
                return (await engine.resume(execution_id)).status
            finally:
                await engine.close()

        assert run_sync(recover()) is ExecutionStatus.COMPLETED


def test_a_killed_server_loses_no_run(placed: Placed) -> None:
    with placed(runs_at_once=1) as place:
        first = place.launch("first")
        place.begun("first")
        second, third = place.launch("second"), place.launch("third")
        status = place.tell({"do": "status"})
        assert status["waiting"] == [second, third]
        psutil.Process(status["pid"]).kill()
        until_now(lambda: ended(status["pid"]))
        place.open_gate()
        for run_id in (first, second, third):
            place.until(run_id, DagsterRunStatus.SUCCESS)
        assert place.started(second) < place.started(third)


def test_recovery_leaves_a_run_alone_that_waits(placed: Placed) -> None:
    with placed(runs_at_once=1) as place:
        place.launch("first")
        place.begun("first")
        playbook = load_playbook(place.playbooks / "gated.yaml")
        noetl = EngineProvider(place.settings.model_copy(update={"recovery_backoff_seconds": 0.01}))
        workload = {"gate": str(place.gate), "name": "second"}
        execution = run_sync(noetl.engine().lifecycle.create(playbook, workload))
        resuming = {EXECUTION_TAG: str(execution.id), RESUME_EPOCH_TAG: str(execution.state.epoch + 1)}
        second = place.launch("second", tags=resuming)
        moment()
        sensor = build_recovery_sensor([compile_playbook(playbook)], noetl)

        def left_alone() -> bool:
            with build_sensor_context(instance=place.instance) as context:
                result = sensor(context)
            assert isinstance(result, SensorResult)
            assert not result.run_requests
            return f"its run {second} waits to be driven" in str(result.skip_reason)

        # the projection follows a moment later while anybody's older transaction holds it back
        until_now(left_alone, "recovery to see the execution")
        place.open_gate()
        place.until(second, DagsterRunStatus.SUCCESS)
        assert run_sync(noetl.engine().runtime.load(execution.id)).state.status is ExecutionStatus.COMPLETED
        close_engines()


def test_a_file_that_leads_nowhere_stops_no_server(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("a: 1")
    before = stamp_of(tmp_path, ".yaml")
    (tmp_path / ".#flow.yaml").symlink_to("nobody@nowhere.1")  # as an editor marks what it edits

    assert stamp_of(tmp_path, ".yaml") == before
