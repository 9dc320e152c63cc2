"""Runs in pods, and steps that have pods of their own: processes that dagster-k8s starts through Kubernetes' API."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterEventType, DagsterInstance, DagsterRun, DagsterRunStatus
from dagster._core.definitions.reconstruct import ReconstructableRepository

from noetl_dagster import embedded
from noetl_dagster.code_location.launch import _origin, prepare
from noetl_dagster.compiler.runs import latest_run
from noetl_dagster.event_loop import run_sync
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings, get_settings
from tests.launcher.jobs_api import Cluster, Pod, jobs_api
from tests.playbooks import text_of
from tests.waiting import until_now

PODS = text_of(
    "pods",
    """
    executor: {spec: {kubernetes: {memory: 1Gi, labels: {team: data}}}}
    workload: {gate: "", times: 1}
    workflow:
      - step: start
        tool: {kind: python, code: "import os; result = os.getpid()"}
        next: [heavy]
      - step: heavy
        spec: {kubernetes: {cpu: 500m, env: {WORD: there}, env_from: {secrets: [keys]}}}
        loop: {in: "{{ range(times) | list }}", iterator: n, spec: {mode: sequential}}
        tool:
          kind: python
          input: {gate: "{{ gate }}", n: "{{ n }}"}
          code: |
            import os, pathlib, time
            with pathlib.Path(gate, f"ran-{n}").open("a") as ran:
                ran.write(f"{os.getpid()}\\n")
            while n and not pathlib.Path(gate, "open").exists():
                time.sleep(0.02)
            if pathlib.Path(gate, "fail").exists():
                raise ValueError("told to fail")
            result = {"pid": os.getpid(), "word": os.environ.get("WORD"), "key": os.environ.get("KEY")}
        next: [{step: finish}]
      - step: finish
        tool: {kind: python, input: {found: "{{ heavy.results }}"}, code: "import os; result = [os.getpid(), found]"}
    """,
)


@dataclass
class Place:
    """A Dagster instance whose runs are pods."""

    cluster: Cluster
    instance: DagsterInstance
    settings: Settings
    gate: Path
    noetl: EngineProvider

    def launch(self, config: dict[str, Any] | None = None, **workload: Any) -> str:
        playbook = load_playbook(self.settings.playbooks_path / "pods.yaml")
        compiled, job = prepare(playbook, self.noetl)
        repository = ReconstructableRepository.for_module("noetl_dagster.definitions", "defs")
        run = self.instance.create_run_for_job(
            job_def=job,
            run_id=str(uuid.uuid4()),
            run_config=compiled.run_config({"gate": str(self.gate), **workload})
            | ({"execution": {"config": config}} if config else {}),
            tags=job.run_tags,
            remote_job_origin=_origin(playbook, compiled.name, self.settings),
            job_code_origin=repository.get_reconstructable_job("pods").get_python_origin(),
        )
        self.instance.launch_run(run.run_id, workspace=None)
        return run.run_id

    def run(self, run_id: str) -> DagsterRun:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def until(self, run_id: str, condition: Callable[[], Any]) -> None:
        try:
            until_now(condition)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run said {self.said(run_id)}") from None

    def ended(self, run_id: str) -> DagsterRun:
        self.until(run_id, lambda: self.run(run_id).is_finished)
        return self.run(run_id)

    def said(self, run_id: str) -> str:
        return "\n".join(entry.user_message for entry in self.instance.all_logs(run_id)) + self.cluster.said()

    def state(self, run_id: str) -> ExecutionState:
        execution_id = int(self.run(run_id).tags["noetl/execution_id"])
        return run_sync(self.noetl.engine().runtime.load(execution_id)).state

    def has_ended(self, run_id: str, n: int) -> bool:
        """Whether the log has the end of an item of the loop."""
        found = (
            "SELECT 1 FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed' "
            "AND node_name = 'heavy' AND current_index = $2"
        )
        execution_id = int(self.run(run_id).tags["noetl/execution_id"])
        return bool(run_sync(self.noetl.engine().runtime.pool.fetchval(found, execution_id, n)))

    def step_pods(self) -> list[Pod]:
        return self.cluster.pods_of("dagster-step-")

    def ran(self, n: int) -> list[int]:
        """Processes that worked on an item."""
        path = self.gate / f"ran-{n}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def until_ran(self, n: int, run_id: str) -> list[int]:
        self.until(run_id, lambda: self.ran(n))
        return self.ran(n)


@pytest.fixture
def place(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    own = settings.model_copy(update={"playbooks_path": tmp_path / "playbooks"})
    for folder in (own.playbooks_path, tmp_path / "gate", tmp_path / "pods"):
        folder.mkdir()
    (own.playbooks_path / "pods.yaml").write_text(PODS)
    home = embedded.dagster_home(own)
    environment = embedded.environment(own) | {"DAGSTER_HOME": str(home)}
    with jobs_api(tmp_path / "pods") as cluster:
        instance = yaml.safe_load((home / "dagster.yaml").read_text())
        instance["run_launcher"] = {
            "module": "dagster_k8s",
            "class": "K8sRunLauncher",
            "config": {
                "load_incluster_config": False,
                "kubeconfig_file": str(cluster.kubeconfig),
                "service_account_name": "runs",
                "instance_config_map": "instance",
                "dagster_home": str(home),
                "job_image": "noetl-dagster:1",
                "job_namespace": "default",
                "env_vars": [f"{name}={value}" for name, value in environment.items()],
            },
        }
        (home / "dagster.yaml").write_text(yaml.safe_dump(instance))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        get_settings.cache_clear()
        with DagsterInstance.get() as found:
            noetl = EngineProvider(own)
            yield Place(cluster, found, own, tmp_path / "gate", noetl)
            (tmp_path / "gate" / "open").touch()
            noetl.close()
    monkeypatch.undo()
    get_settings.cache_clear()


Change = Callable[[str], str]


def test_a_step_has_a_pod_of_its_own_and_its_results_are_where_others_find_them(place: Place) -> None:
    place.cluster.secrets["keys"] = {"KEY": "of the secret"}
    run_id = place.launch()
    run = place.ended(run_id)
    assert run.status is DagsterRunStatus.SUCCESS, place.said(run_id)
    state = place.state(run_id)
    finisher, [found] = state.latest["finish"].envelope["data"]
    [run_pod] = place.cluster.pods_of("dagster-run-")
    [step_pod] = place.step_pods()
    assert state.latest["start"].envelope["data"] == finisher == run_pod.process.pid
    assert found == {"pid": step_pod.process.pid, "word": "there", "key": "of the secret"}
    assert run_pod.container["resources"]["limits"] == {"memory": "1Gi"}
    assert step_pod.container["resources"]["limits"] == {"memory": "1Gi", "cpu": "500m"}
    assert step_pod.container["image"] == "noetl-dagster:1"
    assert step_pod.job["spec"]["template"]["metadata"]["labels"]["team"] == "data"
    assert step_pod.job["spec"]["template"]["spec"]["serviceAccountName"] == "runs"
    events = place.instance.all_logs(run_id, of_type=DagsterEventType.STEP_SUCCESS)
    assert len(events) == 3, "each step ends once"


@pytest.mark.slow
def test_a_failure_in_a_pod_is_the_steps(place: Place) -> None:
    (place.gate / "fail").touch()
    run_id = place.launch()
    assert place.ended(run_id).status is DagsterRunStatus.FAILURE
    state = place.state(run_id)
    assert state.status is ExecutionStatus.FAILED
    assert "told to fail" in str(state.latest["heavy"].envelope["error"])
    assert len(place.step_pods()) == 1, "what failed by itself is not tried again"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_lost_pod_is_replaced_and_nothing_is_done_twice(place: Place, how: signal.Signals) -> None:
    run_id = place.launch(times=2)
    place.until_ran(1, run_id)
    place.until(run_id, lambda: place.has_ended(run_id, 0))
    place.step_pods()[0].end(how)
    place.until(run_id, lambda: len(place.ran(1)) == 2)
    (place.gate / "open").touch()
    assert place.ended(run_id).status is DagsterRunStatus.SUCCESS, place.said(run_id)
    first, second = place.step_pods()
    assert place.ran(0) == [first.process.pid], "what had ended is not done again"
    assert place.ran(1) == [first.process.pid, second.process.pid]
    results = place.state(run_id).latest["finish"].envelope["data"][1]
    assert [one["pid"] for one in results] == [first.process.pid, second.process.pid]


def test_termination_ends_the_pods_of_steps(place: Place) -> None:
    run_id = place.launch(times=2)
    [pid] = place.until_ran(1, run_id)
    assert place.instance.run_launcher.terminate(run_id)
    assert place.ended(run_id).status is DagsterRunStatus.CANCELED, place.said(run_id)
    [pod] = place.step_pods()
    assert pid == pod.process.pid
    until_now(lambda: pod.process.poll() is not None, "the step's pod to end")
    place.until(run_id, lambda: place.state(run_id).status is ExecutionStatus.CANCELLED)


@pytest.mark.slow
def test_every_step_in_a_pod(place: Place) -> None:
    run_id = place.launch({"kubernetes": {"max_concurrent": 2, "step_k8s_config": {"pod_spec_config": {}}}})
    assert place.ended(run_id).status is DagsterRunStatus.SUCCESS, place.said(run_id)
    assert len(place.step_pods()) == 3


@pytest.mark.slow
def test_a_cancelled_execution_ends_its_run_and_the_pods_of_its_steps(place: Place) -> None:
    run_id = place.launch(times=2)
    place.until_ran(1, run_id)
    execution_id = int(place.run(run_id).tags["noetl/execution_id"])
    assert run_sync(place.noetl.engine().lifecycle.cancel(execution_id, "enough"))
    run = place.ended(run_id)
    assert run.status is DagsterRunStatus.CANCELED, place.said(run_id)
    assert latest_run(place.instance, execution_id, "pods").run_id == run_id  # type: ignore[union-attr]
    for pod in place.cluster.pods.values():
        until_now(lambda pod=pod: pod.process.poll() is not None, "the pods to end")
    assert os.getpid() not in place.ran(1)
