"""What a run's process reads of its log for the steps that have pods: everything once, however late it comes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterInvariantViolationError,
    DagsterRunStatus,
    execute_job,
    reconstructable,
)
from dagster._core.events import StepSuccessData
from dagster._core.events.log import EventLogEntry
from dagster._core.execution.api import execute_run_iterator
from dagster._core.execution.retries import RetryMode
from kubernetes.client import ApiException

from noetl_dagster.compiler.executors import pods, threaded
from tests.compiler.executors import jobs

RUN = "4f1c52a4-6f0f-4a63-9a0e-3e2b7f4f2c11"


class Late:
    """An instance's log in which some numbers are not committed yet."""

    def __init__(self, instance: DagsterInstance) -> None:
        self._instance = instance
        self.hidden: set[int] = set()

    def write(self, key: str, age: float = 0) -> None:
        kind, data = DagsterEventType.STEP_SUCCESS, StepSuccessData(0.0)
        event = DagsterEvent(kind.value, "job", step_key=key, event_specific_data=data)
        at = time.time() - age
        entry = EventLogEntry(None, 20, "", RUN, at, step_key=key, job_name="job", dagster_event=event)
        self._instance.event_log_storage.store_event(entry)

    def get_records_for_run(self, run_id: str, cursor: str | None, **more: Any) -> Any:
        page = self._instance.get_records_for_run(run_id, cursor, **more)
        shown = [record for record in page.records if record.storage_id not in self.hidden]
        return Page(shown)

    def numbers(self) -> list[int]:
        return [record.storage_id for record in self._instance.get_records_for_run(RUN).records]


class Page:
    def __init__(self, records: list[Any]) -> None:
        self.records = records


@pytest.fixture
def late(dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Late:
    monkeypatch.setattr(pods, "POLL_SECONDS", 0.0)
    return Late(dagster_instance)


def log_of(late: Late) -> Any:
    return pods._RunLog(late, RUN)  # type: ignore[arg-type]


def test_the_clock_of_another_pod_hides_nothing(late: Late) -> None:
    log = log_of(late)
    ours = log.follow("ours")
    late.write("ours")
    late.write("other", age=3_600)
    late.hidden = {late.numbers()[0]}
    assert log.of(ours) == log.of(ours) == []
    late.hidden.clear()
    assert [event.step_key for event in log.of(ours)] == ["ours"]
    assert log.of(ours) == []


def test_an_event_that_came_later_than_any_may_is_found_again(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "LATE_SECONDS", -1.0)
    late.write("ours")
    log = log_of(late)
    ours = log.follow("ours")
    late.write("ours")
    late.write("other")
    late.hidden = {late.numbers()[1]}
    assert log.of(ours) == log.of(ours) == []
    late.hidden.clear()
    assert log.of(ours) == []
    log.read_again(ours)
    log.read_again(ours)
    assert [event.event_type for event in log.of(ours)] == [DagsterEventType.STEP_SUCCESS]


def test_only_what_steps_with_pods_say_is_kept(late: Late) -> None:
    log = log_of(late)
    ours = log.follow("ours")
    late.write("thread")
    assert log.of(ours) == []
    assert set(log._followed) == {"ours"}
    log.leave(ours)
    assert not log._followed


def test_the_next_pod_is_followed_though_the_thread_of_the_last_one_ends_later(late: Late) -> None:
    log = log_of(late)
    last = log.follow("ours")
    next_one = log.follow("ours")
    log.leave(last)
    late.write("ours")
    assert [event.step_key for event in log.of(next_one)] == ["ours"]


class Failing:
    """Makes jobs of Kubernetes whose pods fail before they say a word."""

    def __init__(self) -> None:
        self.launched = 0
        self._api_client = self

    def launch_step(self, _: Any) -> list[DagsterEvent]:
        self.launched += 1
        return []

    def _get_container_context(self, _: Any) -> Any:
        return SimpleNamespace(namespace="default")

    def _get_k8s_step_job_name(self, _: Any) -> str:
        return f"job-{self.launched}"

    def get_job_status(self, **_: Any) -> Any:
        return SimpleNamespace(failed=1, succeeded=None)


def test_a_database_that_is_away_ends_no_step_and_lost_pods_are_counted(
    dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("POLL_SECONDS", "HEALTH_SECONDS", "BESIDE_SECONDS"):
        monkeypatch.setattr(pods, name, 0.01)
    monkeypatch.setattr(pods, "HEALTH_SECONDS", 0.3)  # the database is asked before the pod is found lost
    handler = Failing()

    def away(context: Any) -> bool:
        raise ConnectionRefusedError("nobody listens")

    def made(context: Any, retries: Any, beside: Any) -> Any:
        return pods.StepPods(context, handler, pods._code_origin(context), retries, away)

    monkeypatch.setattr(threaded, "pods_of", made)
    with execute_job(reconstructable(jobs.apart), dagster_instance) as result:
        assert not result.success
        [failure] = result.filter_events(lambda event: event.is_step_failure)
    assert "the Kubernetes job of step alone failed" in str(failure.step_failure_data.error)
    assert handler.launched == 1 + pods.LOST_AT_MOST
    assert [line for line in caplog.messages if "nobody listens" in line] == [
        "what goes on beside pods: tried again until it succeeds: ConnectionRefusedError: nobody listens"
    ]


def test_without_the_right_to_create_jobs_a_step_names_the_value_of_the_chart(
    dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(Failing):
        def launch_step(self, _: Any) -> list[DagsterEvent]:
            raise RuntimeError("no job") from ApiException(403, "Forbidden")

    def made(context: Any, retries: Any, beside: Any) -> Any:
        return pods.StepPods(context, Forbidden(), pods._code_origin(context), retries, beside)

    monkeypatch.setattr(threaded, "pods_of", made)
    with execute_job(reconstructable(jobs.apart), dagster_instance) as result:
        [failure] = result.filter_events(lambda event: event.is_step_failure)
    assert "with runs.containers" in str(failure.step_failure_data.error)


def test_without_a_token_a_run_with_pods_names_the_value_of_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    class K8sRunLauncher:
        load_incluster_config, kubeconfig_file = True, None

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)  # as in a process that is in no cluster
    context = SimpleNamespace(
        instance=SimpleNamespace(run_launcher=K8sRunLauncher()),
        dagster_run=SimpleNamespace(job_code_origin="code"),
        job=0,
    )
    with pytest.raises(DagsterInvariantViolationError, match=r"pods of their own: .* with runs\.containers"):
        pods.pods_of(context, RetryMode.ENABLED)


def test_a_run_whose_process_was_lost_is_not_begun_again(dagster_instance: DagsterInstance) -> None:
    job = reconstructable(jobs.many)
    run = dagster_instance.create_run_for_job(job.get_definition(), status=DagsterRunStatus.STARTED)
    list(execute_run_iterator(job, run, dagster_instance, resume_from_failure=True))
    assert dagster_instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE  # type: ignore[union-attr]
    said = [str(entry.dagster_event) for entry in dagster_instance.all_logs(run.run_id)]
    assert any("set max_resume_run_attempts of run_monitoring in dagster.yaml to 0" in line for line in said)
