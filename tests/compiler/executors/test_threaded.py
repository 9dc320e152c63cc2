"""The threaded executor is the in-process executor, but that steps which wait do so at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    ReexecutionOptions,
    execute_job,
    reconstructable,
)
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run, execute_run_iterator

from tests import forked
from tests.compiler.executors import jobs
from tests.compiler.executors.jobs import SEEN
from tests.waiting import until_now

Execute = Callable[..., Any]
Process = forked.Forked | subprocess.Popen[Any]

RUN = """
import sys
from dagster import DagsterInstance, execute_job, reconstructable
from noetl_dagster.compiler.executors import threaded
from tests.compiler.executors import jobs

threaded.INTERRUPT_SECONDS = 0.2
with DagsterInstance.from_config(sys.argv[1]) as instance:
    folder = {"config": {"folder": sys.argv[2]}}
    ops = {name: folder for name in sys.argv[4:]}
    execute_job(reconstructable(getattr(jobs, sys.argv[3])), instance, run_config={"ops": ops})
"""


@pytest.fixture
def execute(dagster_instance: DagsterInstance) -> Iterator[Execute]:
    """Runs a job of ``jobs`` to its end in this process."""
    SEEN.clear()
    opened = []

    def run(name: str, config: dict[str, Any] | None = None, **options: Any) -> Any:
        job = reconstructable(getattr(jobs, name))
        run_config = {"execution": {"config": config or {}}, **options.pop("run_config", {})}
        result = execute_job(job, dagster_instance, run_config=run_config, **options)
        opened.append(result)
        return result.__enter__()

    yield run
    for result in opened:
        result.__exit__(None, None, None)


def steps_of(result: Any, kind: DagsterEventType) -> list[str]:
    return sorted(event.step_key or "" for event in result.all_events if event.event_type is kind)


def test_steps_that_are_ready_run_at_the_same_time(execute: Execute) -> None:
    result = execute("meeting")
    assert result.success
    assert result.output_for_node("together") == ["a", "b", "c", "d"]


def test_no_more_than_asked_for(execute: Execute) -> None:
    assert execute("many", {"max_concurrent": 3}).success
    assert SEEN.most["slow"] <= 3
    SEEN.clear()
    assert execute("many", {"max_concurrent": 1}).success
    assert SEEN.most["slow"] == 1


def test_tags_limit_what_runs_together(execute: Execute) -> None:
    limits = [{"key": "kind", "value": "slow", "limit": 2}]
    assert execute("many", {"tag_concurrency_limits": limits}).success
    assert SEEN.most["slow"] <= 2


def test_pools_limit_what_runs_together(execute: Execute, dagster_instance: DagsterInstance) -> None:
    dagster_instance.event_log_storage.set_concurrency_slots("narrow", 1)
    result = execute("in_a_pool")
    assert result.success
    assert SEEN.most["narrow"] == 1
    info = dagster_instance.event_log_storage.get_concurrency_info("narrow")
    assert info.active_slot_count == 0


def test_steps_are_tried_again_and_hooks_run(execute: Execute) -> None:
    assert execute("retried").success
    assert SEEN.happened == ["try 0", "try 1", "try 2", "hook: flaky went well"]


def test_retries_can_be_switched_off(execute: Execute) -> None:
    assert not execute("retried", {"retries": {"disabled": {}}}).success
    assert SEEN.happened[0] == "try 0"
    assert "failed" in SEEN.happened[1]


def test_outputs_that_are_not_there_skip_what_follows(execute: Execute) -> None:
    result = execute("chosen")
    assert result.success
    assert SEEN.happened == ["followed"]
    assert steps_of(result, DagsterEventType.STEP_SKIPPED) == ["on_no"]


def test_a_failure_leaves_its_neighbours_alone_and_is_run_again_from_there(
    execute: Execute, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    config = {"run_config": {"ops": {"fails_once": {"config": {"marker": str(tmp_path / "marker")}}}}}
    first = execute("halved", raise_on_error=False, **config)
    assert not first.success
    assert steps_of(first, DagsterEventType.STEP_FAILURE) == ["fails_once"]
    assert steps_of(first, DagsterEventType.STEP_SUCCESS) == ["beside"]
    assert {"hook: fails_once failed: the first time", "hook: beside went well"} <= set(SEEN.happened)
    options = ReexecutionOptions.from_failure(first.run_id, dagster_instance)
    second = execute("halved", reexecution_options=options, **config)
    assert second.success
    assert steps_of(second, DagsterEventType.STEP_SUCCESS) == ["after_failure", "fails_once"]


def test_an_error_is_raised_where_that_was_asked_for(execute: Execute, tmp_path: Path) -> None:
    config = {"run_config": {"ops": {"fails_once": {"config": {"marker": str(tmp_path / "marker")}}}}}
    with pytest.raises(ValueError, match="the first time"):
        execute("halved", raise_on_error=True, **config)


def log_key_of(instance: DagsterInstance, run_id: str) -> list[str]:
    """The key of the one file of a run's output."""
    [entry] = instance.all_logs(run_id, of_type=DagsterEventType.LOGS_CAPTURED)
    captured = entry.get_dagster_event().logs_captured_data
    return [*instance.compute_log_manager.build_log_key_for_run(run_id, captured.file_key)]


def test_output_of_all_steps_is_in_one_file(execute: Execute, dagster_instance: DagsterInstance) -> None:
    result = execute("meeting")
    key = log_key_of(dagster_instance, result.run_id)
    text = (dagster_instance.compute_log_manager.get_log_data(key).stdout or b"").decode()
    assert sorted(text.split("\n")[:4]) == [f"stdout of {name}" for name in "abcd"]


def test_checks_of_assets_run(dagster_instance: DagsterInstance) -> None:
    job = jobs.assets.resolve_job_def("asset_job")
    result = job.execute_in_process(instance=dagster_instance)  # with Dagster's own executor, for comparison

    run = dagster_instance.create_run_for_job(job)
    own = execute_run(InMemoryJob(job), run, dagster_instance)
    assert own.success
    kinds = {
        name: sorted(
            (event.step_key or "", event.event_type_value) for event in one.all_events if event.step_key is not None
        )
        for name, one in (("theirs", result), ("ours", own))
    }
    assert kinds["ours"] == kinds["theirs"]
    assert any(kind == "ASSET_CHECK_EVALUATION" for _, kind in kinds["ours"])


def test_a_run_whose_process_was_lost_is_not_begun_again(dagster_instance: DagsterInstance) -> None:
    job = reconstructable(jobs.many)
    run = dagster_instance.create_run_for_job(job.get_definition(), status=DagsterRunStatus.STARTED)
    list(execute_run_iterator(job, run, dagster_instance, resume_from_failure=True))
    assert dagster_instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE  # type: ignore[union-attr]
    messages = [str(entry.dagster_event) for entry in dagster_instance.all_logs(run.run_id)]
    assert any("set max_resume_run_attempts of run_monitoring in dagster.yaml to 0" in line for line in messages)


@contextmanager
def started(tmp_path: Path, job: str, *ops: str) -> Iterator[tuple[Process, Path, Path]]:
    """A process that runs a job of ``jobs``, the folder of its marks, and its home of Dagster."""
    folder, home = tmp_path / "marks", tmp_path / "dagster"
    folder.mkdir()
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    command = [sys.executable, "-c", RUN, str(home), str(folder), job, *ops]
    process = forked.start(command, env={**os.environ, "DAGSTER_HOME": str(home)})
    try:
        yield process, folder, home
    finally:
        process.kill()


def test_a_step_that_is_interrupted_keeps_no_lock(tmp_path: Path) -> None:
    """Others wait for it: whoever logs, an event loop that is to end a future."""
    with started(tmp_path, "locked", "waits_for_a_lock") as (process, folder, _):
        until_now((folder / "began").exists)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.8)  # more than one interrupt falls into the waiting
        (folder / "release").touch()
        until_now(lambda: process.poll() is not None)
    assert (folder / "free").exists()


def test_a_terminated_run_interrupts_its_steps(tmp_path: Path) -> None:
    with started(tmp_path, "endless", "left", "right") as (process, folder, home):
        until_now(lambda: len(list(folder.glob("began-*"))) == 2)
        process.send_signal(signal.SIGTERM)
        until_now(lambda: process.poll() is not None)
    assert {path.name for path in folder.iterdir()} == {
        f"{what}-{name}" for what in ("began", "ended") for name in ("left", "right")
    }
    with DagsterInstance.from_config(str(home)) as instance:
        [run] = instance.get_runs()
        failed = [entry.dagster_event for entry in instance.all_logs(run.run_id, of_type=DagsterEventType.STEP_FAILURE)]
        key = log_key_of(instance, run.run_id)
        assert instance.compute_log_manager.is_capture_complete(key)  # else its readers wait for more
    assert run.status in (DagsterRunStatus.CANCELED, DagsterRunStatus.FAILURE)
    assert sorted(event.step_key for event in failed) == ["left", "right"]
    assert all("Interrupted" in event.step_failure_data.error.to_string() for event in failed)
