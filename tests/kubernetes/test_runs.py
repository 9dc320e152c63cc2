"""Runs in a cluster: code location and daemon as the chart deploys them, and the pods that dagster-k8s makes.

The test stands where the webserver does: it launches and terminates runs with the rights of its service account.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget
from dagster_graphql.cli import execute_query
from dagster_graphql.client.query import LAUNCH_PIPELINE_EXECUTION_MUTATION
from kubernetes import client, config

from noetl_dagster import embedded
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from tests.helm.chart import KIND, NAMESPACE, Manifest, dagster_yaml, manifests, of_kind, overlaid
from tests.kubernetes.cluster import Cluster
from tests.playbooks import text_of
from tests.waiting import PROCESS_SECONDS, until_now

NAME = "trial-noetl-dagster"
FIRST_KINDS = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Secret")

ITEMS = 6
LOOP = text_of(
    "squares",
    """
    workflow:
      - step: start
        loop: {in: "{{ range(6) | list }}", iterator: n, spec: {mode: sequential}}
        tool:
          kind: python
          input: {n: "{{ n }}"}
          code: |
            import pathlib, time
            with pathlib.Path("/gate", f"ran-{n}").open("a") as ran:
                ran.write("once\\n")
            while n == 3 and not pathlib.Path("/gate/open").exists():
                time.sleep(0.02)
            result = n * n
        next: [{step: total}]
      - step: total
        tool: {kind: python, input: {found: "{{ start.results }}"}, code: "result = sum(found)"}
    """,
)


@dataclass
class Place:
    """A release in a cluster, and what the webserver has of it."""

    cluster: Cluster
    instance: DagsterInstance
    workspace: WorkspaceProcessContext
    gate: Path
    noetl: EngineProvider

    def launch(self) -> str:
        selector = {
            "jobName": "squares",
            "repositoryName": "__repository__",
            "repositoryLocationName": "noetl_dagster",
        }
        asked = {"executionParams": {"selector": selector, "runConfigData": {}}}
        found = execute_query(self.workspace, LAUNCH_PIPELINE_EXECUTION_MUTATION, asked)
        answer = found["data"]["launchPipelineExecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        run_id: str = answer["run"]["runId"]
        return run_id

    def run(self, run_id: str) -> DagsterRun:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def until(self, condition: Callable[[], Any], run_id: str) -> Any:
        """Waits as long as processes take that start one another on a busy machine."""
        try:
            return until_now(condition, seconds=PROCESS_SECONDS)
        except AssertionError as error:
            told = "\n".join(entry.user_message for entry in self.instance.all_logs(run_id))
            raise AssertionError(f"{error}; the run said {told}\n{self.cluster.said()}") from None

    def ended(self, run_id: str) -> DagsterRunStatus:
        """Waits for the pod first: a busy machine takes its time to start all this."""
        self.until(lambda: self.pods(run_id), run_id)
        self.until(lambda: self.run(run_id).status is not DagsterRunStatus.STARTING, run_id)
        self.until(lambda: self.run(run_id).is_finished, run_id)
        return self.run(run_id).status

    def pods(self, run_id: str) -> list[Manifest]:
        return self.cluster.pods(f"dagster/run-id={run_id}", NAMESPACE)

    def until_held(self, run_id: str) -> None:
        """Waits until the loop is in the middle."""
        self.until(lambda: self.pods(run_id), run_id)
        self.until(lambda: self.run(run_id).status is DagsterRunStatus.STARTED, run_id)
        self.until(lambda: self.ran()[3], run_id)

    def recorded(self, run_id: str) -> int:
        """How many items of the loop have ended according to the log."""
        execution_id = int(self.run(run_id).tags["noetl/execution_id"])
        query = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'"
        return int(run_sync(self.noetl.engine().runtime.pool.fetchval(query, execution_id)))

    def ran(self) -> list[int]:
        """How often each item ran."""
        paths = [self.gate / f"ran-{n}" for n in range(ITEMS)]
        return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]

    def state(self, run_id: str) -> ExecutionState:
        execution_id = int(self.run(run_id).tags["noetl/execution_id"])
        return run_sync(self.noetl.engine().runtime.load(execution_id)).state

    def ready(self, component: str) -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in self.cluster.pods(f"app.kubernetes.io/component={component}", NAMESPACE)
            for condition in pod["status"].get("conditions", ())
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]


def release(settings: Settings, gate: Path) -> list[Manifest]:
    """The chart's objects over the embedded services."""
    values = overlaid(
        KIND,
        {
            "playbooks": {"files": {"squares.yaml": LOOP}},
            "runs": {"containers": False},
            "pod": {
                "extraVolumes": [{"name": "gate", "hostPath": {"path": str(gate)}}],
                "extraVolumeMounts": [{"name": "gate", "mountPath": "/gate"}],
            },
        },
    )
    objects = copy.deepcopy(manifests(values))
    given = embedded.environment(settings) | {
        "NOETL_MINIO_ACCESS_KEY": settings.minio_access_key,
        "NOETL_MINIO_SECRET_KEY": settings.minio_secret_key.get_secret_value(),
    }
    for name in ("NOETL_HOME", "NOETL_PVC_MOUNT_PATH", "NOETL_EMBEDDED"):
        given.pop(name, None)
    secret = of_kind(objects, "Secret")[f"{NAME}-trial"]
    secret["stringData"] = {name: given.pop(name) for name in list(given) if name in secret["data"]}
    secret["data"] = {name: one for name, one in secret["data"].items() if name not in secret["stringData"]}
    maps = of_kind(objects, "ConfigMap")
    maps[f"{NAME}-settings"]["data"] |= given | {"NOETL_RECOVERY_BACKOFF_SECONDS": "1"}
    instance = dagster_yaml(objects)
    instance["compute_logs"]["config"] |= {
        "endpoint_url": settings.minio_endpoint,
        "bucket": settings.minio_bucket,
    }
    instance["run_monitoring"]["poll_interval_seconds"] = 2
    maps[f"{NAME}-instance"]["data"]["dagster.yaml"] = yaml.safe_dump(instance)
    return objects


@pytest.fixture
def place(cluster: Cluster, settings: Settings, tmp_path: Path, noetl: EngineProvider) -> Iterator[Place]:
    gate = tmp_path / "gate"
    gate.mkdir()
    objects = release(settings, gate)
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for kind in FIRST_KINDS:
        for one in of_kind(objects, kind).values():
            cluster.create(one)
    service = cluster.create(of_kind(objects, "Service")[f"{NAME}-code-location"])
    for component in ("code-location", "daemon"):
        cluster.create(of_kind(objects, "Deployment")[f"{NAME}-{component}"])
    home = webserver_home(cluster, objects, settings, tmp_path)
    target = GrpcServerTarget(host=service["spec"]["clusterIP"], port=4000, socket=None, location_name="noetl_dagster")
    with pytest.MonkeyPatch.context() as patch:
        assert settings.dagster_db_url is not None
        patch.setenv("NOETL_DAGSTER_DB_URL", settings.dagster_db_url)
        with DagsterInstance.from_config(str(home)) as instance:
            found = Place(cluster, instance, None, gate, noetl)  # type: ignore[arg-type]
            until_now(lambda: found.ready("code-location") or failed(cluster), "the code location")
            with WorkspaceProcessContext(instance, target) as workspace:
                found.workspace = workspace
                yield found


def failed(cluster: Cluster) -> bool:
    for pod in cluster.pods("app.kubernetes.io/component=code-location", NAMESPACE):
        for status in pod["status"].get("containerStatuses", ()):
            assert not status["restartCount"], cluster.said()
    return False


def webserver_home(cluster: Cluster, objects: list[Manifest], settings: Settings, tmp_path: Path) -> Path:
    """The instance of the release, outside of it, with the rights of the webserver."""
    folder = tmp_path / "webserver"
    folder.mkdir()
    token = cluster.rights.token(NAMESPACE, f"{NAME}-webserver")
    (folder / "kubeconfig").write_text(cluster.config_of(token, NAMESPACE))
    instance = dagster_yaml(objects)
    instance["run_launcher"]["config"] |= {
        "load_incluster_config": False,
        "kubeconfig_file": str(folder / "kubeconfig"),
    }
    for name in ("compute_logs", "local_artifact_storage"):
        instance[name]["config"]["base_dir"] = str(folder / name)
    (folder / "dagster.yaml").write_text(yaml.safe_dump(instance))
    return folder


def test_a_run_is_a_job_and_ends(place: Place) -> None:
    (place.gate / "open").touch()
    run_id = place.launch()
    assert place.ended(run_id) is DagsterRunStatus.SUCCESS, place.cluster.said()
    state = place.state(run_id)
    assert state.status is ExecutionStatus.COMPLETED
    assert state.latest["total"].envelope["data"] == sum(n * n for n in range(ITEMS))
    assert place.ran() == [1] * ITEMS
    [pod] = place.pods(run_id)
    assert pod["spec"]["serviceAccountName"] == f"{NAME}-run"
    until_now(lambda: place.pods(run_id)[0]["status"]["phase"] == "Succeeded")


@pytest.mark.slow
def test_a_terminated_run_cancels_its_execution_and_leaves_no_job(place: Place) -> None:
    run_id = place.launch()
    place.until_held(run_id)
    assert place.instance.run_launcher.terminate(run_id)
    assert place.ended(run_id) is DagsterRunStatus.CANCELED
    place.until(lambda: place.state(run_id).status is ExecutionStatus.CANCELLED, run_id)
    with config.new_client_from_config(str(place.cluster.kubeconfig)) as api:
        jobs = client.BatchV1Api(api)
        place.until(lambda: not jobs.list_namespaced_job(NAMESPACE).items, run_id)
    place.until(lambda: not place.pods(run_id), run_id)
    assert place.ran() == [1, 1, 1, 1, 0, 0]


@pytest.mark.slow
def test_a_lost_pod_is_found_and_another_run_goes_on(place: Place) -> None:
    run_id = place.launch()
    place.until_held(run_id)
    place.until(lambda: place.recorded(run_id) == 3, run_id)  # the log is written a moment after an item has ended
    [pod] = place.pods(run_id)
    place.cluster.lose(pod["metadata"]["name"], NAMESPACE)
    (place.gate / "open").touch()
    place.until(lambda: place.run(run_id).status is DagsterRunStatus.FAILURE, run_id)
    other = place.until(lambda: [one for one in place.instance.get_runs() if one.run_id != run_id], run_id)
    [again] = other
    assert place.ended(again.run_id) is DagsterRunStatus.SUCCESS, place.cluster.said()
    assert again.tags["noetl/execution_id"] == place.run(run_id).tags["noetl/execution_id"]
    state = place.state(run_id)
    assert state.status is ExecutionStatus.COMPLETED
    assert state.latest["total"].envelope["data"] == sum(n * n for n in range(ITEMS))
    assert place.ran() == [1, 1, 1, 2, 1, 1], "only what the lost pod was at ran again"


@pytest.mark.slow
def test_a_run_goes_on_while_the_code_location_rolls(place: Place) -> None:
    run_id = place.launch()
    place.until_held(run_id)
    before = place.ready("code-location")
    change = {"spec": {"template": {"metadata": {"annotations": {"rolled": "yes"}}}}}
    with config.new_client_from_config(str(place.cluster.kubeconfig)) as api:
        client.AppsV1Api(api).patch_namespaced_deployment(f"{NAME}-code-location", NAMESPACE, change)
    place.until(lambda: set(place.ready("code-location")) - set(before), run_id)
    place.until(lambda: not set(place.ready("code-location")) & set(before), run_id)
    (place.gate / "open").touch()
    assert place.ended(run_id) is DagsterRunStatus.SUCCESS, place.cluster.said()
    assert place.ran() == [1] * ITEMS
