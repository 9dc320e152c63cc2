"""The stand-in itself: what is proven through it stands on what is tested here."""

from __future__ import annotations

import itertools
import os
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.kubernetes.cluster import Cluster, services
from tests.kubernetes.cluster.kubelet.process import Process
from tests.waiting import PATIENCE_SECONDS, ended, until_now

Manifest = dict[str, Any]


@dataclass
class Clients:
    core: client.CoreV1Api
    batch: client.BatchV1Api
    apps: client.AppsV1Api


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[Clients]:
    with config.new_client_from_config(str(cluster.kubeconfig)) as api:
        yield Clients(client.CoreV1Api(api), client.BatchV1Api(api), client.AppsV1Api(api))


def job(
    name: str, script: str, container: Manifest | None = None, pod: Manifest | None = None, **spec: Any
) -> Manifest:
    main = {"name": "main", "image": "busybox:1", "command": ["sh", "-c", script], **(container or {})}
    template = {"spec": {"restartPolicy": "Never", "containers": [main], **(pod or {})}}
    return {"metadata": {"name": name}, "spec": {"backoffLimit": 0, **spec, "template": template}}


def deployment(script: str, replicas: int = 1, **container: Any) -> Manifest:
    main = {"name": "main", "image": "busybox:1", "command": ["sh", "-c", script], **container}
    labels = {"app": "web"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": [main]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"metadata": {"name": "web"}, "spec": spec}


def finished(clients: Clients, name: str) -> client.V1JobStatus:
    return until_now(
        lambda: (status := clients.batch.read_namespaced_job_status(name, "default").status).conditions and status
    )


def only_pod(cluster: Cluster, name: str) -> str:
    [pod] = until_now(lambda: cluster.pods(f"job-name={name}"))
    return str(pod["metadata"]["name"])


def ready_pods(cluster: Cluster) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in cluster.pods("app=web")
        for condition in pod["status"].get("conditions", ())
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]


def test_a_job_runs_with_its_environment_its_mounts_and_a_root_of_its_own(
    cluster: Cluster, clients: Clients, tmp_path: Path
) -> None:
    clients.core.create_namespaced_secret("default", {"metadata": {"name": "s"}, "stringData": {"KEY": "secret"}})
    clients.core.create_namespaced_config_map("default", {"metadata": {"name": "c"}, "data": {"a.txt": "of the map"}})
    script = (
        "echo $KEY-$OTHER-$NAME-$CPU-$BOTH; cat /etc/own/a.txt; echo x > /data/x && cat /data/x; "
        "touch /nowhere; touch /etc/own/y; cat /sub/inner; which python; echo $PATH_OF_THE_TEST; exit 0"
    )
    (tmp_path / "inner").write_text("on the host\n")
    manifest = job(
        "full",
        script,
        {
            "envFrom": [{"secretRef": {"name": "s"}}],
            "env": [
                {"name": "OTHER", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a.txt"}}},
                {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                {
                    "name": "CPU",
                    "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}},
                },
                {"name": "BOTH", "value": "$(KEY)+$(NAME)"},
            ],
            "resources": {"limits": {"cpu": "1500m"}},
            "securityContext": {"readOnlyRootFilesystem": True},
            "volumeMounts": [
                {"name": "map", "mountPath": "/etc/own"},
                {"name": "data", "mountPath": "/data"},
                {"name": "host", "mountPath": "/sub/inner", "subPath": "inner"},
            ],
        },
        {
            "volumes": [
                {"name": "map", "configMap": {"name": "c"}},
                {"name": "data", "emptyDir": {}},
                {"name": "host", "hostPath": {"path": str(tmp_path)}},
            ]
        },
    )
    clients.batch.create_namespaced_job("default", manifest)
    assert finished(clients, "full").succeeded == 1, cluster.said()
    lines = cluster.log(only_pod(cluster, "full")).splitlines()
    assert lines[0] == "secret-of the map-default-1500-secret+default"
    assert lines[1:] == [
        "of the mapx",
        "touch: cannot touch '/nowhere': Read-only file system",
        "touch: cannot touch '/etc/own/y': Read-only file system",
        "on the host",
        "/opt/noetl/.venv/bin/python",
        "",
    ]


def test_a_job_fails_is_tried_again_and_is_deleted(cluster: Cluster, clients: Clients) -> None:
    clients.batch.create_namespaced_job("default", job("bad", "exit 3", backoffLimit=1))
    status = finished(clients, "bad")
    assert (status.failed, status.conditions[-1].reason) == (2, "BackoffLimitExceeded")
    pod = cluster.pods("job-name=bad")[0]
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    clients.batch.create_namespaced_job("default", job("long", "sleep 1000 & sleep 1000"))
    [pid] = until_now(lambda: list(cluster.processes(only_pod(cluster, "long")).values()))
    children = until_now(lambda: psutil.Process(pid).children())
    clients.batch.delete_namespaced_job("long", "default")
    assert cluster.pods("job-name=long"), "by default a job's pods stay"
    clients.core.delete_namespaced_pod(only_pod(cluster, "long"), "default", grace_period_seconds=1)
    until_now(lambda: not cluster.pods("job-name=long"))
    until_now(lambda: all(ended(one) for one in [pid, *(child.pid for child in children)]))


def test_a_lost_pod_fails_its_job(cluster: Cluster, clients: Clients) -> None:
    clients.batch.create_namespaced_job("default", job("lost", "sleep 1000"))
    until_now(lambda: cluster.processes(only_pod(cluster, "lost")))
    cluster.lose(only_pod(cluster, "lost"))
    assert finished(clients, "lost").failed == 1
    [pod] = cluster.pods("job-name=lost")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def test_what_does_not_fit_is_refused(cluster: Cluster, clients: Clients) -> None:
    def refusal(manifest: Manifest) -> str:
        with pytest.raises(ApiException) as raised:
            clients.batch.create_namespaced_job("default", manifest)
        assert raised.value.status == 422
        return str(raised.value.body)

    assert "comand" in refusal(job("a", "true", {"comand": ["x"]}))
    assert "volumeMounts[0].name" in refusal(job("a", "true", {"volumeMounts": [{"name": "no", "mountPath": "/x"}]}))
    assert "restartPolicy" in refusal(job("a", "true", pod={"restartPolicy": "Always"}))
    assert "metadata.name" in refusal(job("A_b", "true"))
    clients.core.create_namespaced_config_map("default", {"metadata": {"name": "twice"}})
    with pytest.raises(ApiException, match="409"):
        clients.core.create_namespaced_config_map("default", {"metadata": {"name": "twice"}})
    with pytest.raises(ApiException, match="404"):
        clients.core.create_namespaced_config_map("nowhere", {"metadata": {"name": "c"}})


def test_a_pod_waits_for_what_it_refers_to(cluster: Cluster, clients: Clients) -> None:
    manifest = job("waits", "echo $KEY", {"envFrom": [{"secretRef": {"name": "late"}}]})
    clients.batch.create_namespaced_job("default", manifest)
    name = only_pod(cluster, "waits")

    def waiting() -> Any:
        pod = clients.core.read_namespaced_pod(name, "default")
        return (pod.status.container_statuses or [None])[0] and pod.status.container_statuses[0].state.waiting

    until_now(lambda: waiting() and waiting().reason == "CreateContainerConfigError")
    assert 'secret "late" not found' in waiting().message
    clients.core.create_namespaced_secret("default", {"metadata": {"name": "late"}, "stringData": {"KEY": "here"}})
    assert finished(clients, "waits").succeeded == 1
    assert cluster.log(name) == "here\n"
    clients.batch.create_namespaced_job("default", job("nobody", "true", pod={"serviceAccountName": "nobody"}))
    events = until_now(lambda: clients.core.list_namespaced_event("default").items)
    assert 'serviceaccount "nobody" not found' in events[0].message
    assert not cluster.pods("job-name=nobody")


def config_error(pod: Manifest) -> str:
    [status] = pod["status"].get("containerStatuses") or [{"state": {}}]
    waiting = status["state"].get("waiting", {})
    return str(waiting.get("message", "")) if waiting.get("reason") == "CreateContainerConfigError" else ""


def of_key(kind: str, key: str) -> Manifest:
    return {"env": [{"name": "A", "valueFrom": {f"{kind}KeyRef": {"name": "late", "key": key}}}]}


def mounted(**volume: Any) -> Manifest:
    return {"volumes": [{"name": "v", **volume}]}


CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
OTHER_KEY = [{"key": "b", "path": "b"}]


@pytest.mark.parametrize("image", ["busybox", "recorded"])
@pytest.mark.parametrize(
    ("container", "pod", "said", "event", "late"),
    [
        (of_key("secret", "a"), {}, 'secret "late" not found', "", ("Secret", "a")),
        (of_key("configMap", "a"), {}, 'configmap "late" not found', "", ("ConfigMap", "a")),
        (of_key("configMap", "b"), {}, 'configmap "late" not found', "", ("ConfigMap", "b")),
        ({"envFrom": [{"configMapRef": {"name": "late"}}]}, {}, 'configmap "late" not found', "", ("ConfigMap", "a")),
        ({}, mounted(secret={"secretName": "late"}), 'secret "late" not found', "FailedMount", ("Secret", "a")),
        ({}, mounted(configMap={"name": "late"}), 'configmap "late" not found', "FailedMount", ("ConfigMap", "a")),
        (
            {},
            mounted(projected={"sources": [{"secret": {"name": "late", "items": OTHER_KEY}}]}),
            'MountVolume.SetUp failed for volume "v" : secret "late" not found',
            "FailedMount",
            ("Secret", "b"),
        ),
        (
            {},
            mounted(persistentVolumeClaim={"claimName": "late"}),
            'persistentvolumeclaim "late" not found',
            "FailedScheduling",
            ("PersistentVolumeClaim", ""),
        ),
    ],
)
def test_a_container_waits_for_what_its_pod_refers_to(
    cluster: Cluster, image: str, container: Manifest, pod: Manifest, said: str, event: str, late: tuple[str, str]
) -> None:
    manifest = job("waits", "true", {"image": image, **container}, pod)
    cluster.create({"apiVersion": "batch/v1", "kind": "Job", **manifest})
    name = only_pod(cluster, "waits")
    if event:
        [told] = until_now(lambda: cluster.store.list("Event", "default"))
        assert told["reason"] == event
        assert said in told["message"]
        assert told["involvedObject"]["name"] == name
        found = cluster.store.need("Pod", "default", name)
        unscheduled = event == "FailedScheduling"
        for status in found["status"].get("containerStatuses", ()):
            assert status["state"] == {"waiting": {"reason": "ContainerCreating"}}
        if unscheduled:
            [condition] = until_now(lambda: cluster.store.need("Pod", "default", name)["status"].get("conditions"))
            assert (condition["type"], condition["reason"]) == ("PodScheduled", "Unschedulable")
    else:
        until_now(lambda: said in config_error(cluster.store.need("Pod", "default", name)))
    kind, key = late
    made: Manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "late"}}
    content = {"Secret": {"stringData": {key: "x"}}, "ConfigMap": {"data": {key: "x"}}}
    cluster.create(made | content.get(kind, {"spec": CLAIM}))
    until_now(lambda: cluster.store.need("Job", "default", "waits")["status"].get("succeeded"), cluster.said())


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap"])
def test_a_key_that_is_not_there_is_missed(cluster: Cluster, kind: str) -> None:
    cluster.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": "late"}})
    reference = of_key(kind[0].lower() + kind[1:], "absent")
    cluster.create({"apiVersion": "batch/v1", "kind": "Job", **job("waits", "true", reference)})
    name = only_pod(cluster, "waits")
    said = f"couldn't find key absent in {kind} default/late"
    until_now(lambda: config_error(cluster.store.need("Pod", "default", name)) == said)


def test_watches_tell_what_happens(clients: Clients) -> None:
    made = clients.core.create_namespaced_config_map("default", {"metadata": {"name": "c", "labels": {"a": "b"}}})
    clients.core.create_namespaced_config_map("default", {"metadata": {"name": "other"}})
    clients.core.patch_namespaced_config_map("c", "default", {"data": {"x": "1"}})
    clients.core.delete_namespaced_config_map("c", "default")
    stream = watch.Watch().stream(
        clients.core.list_namespaced_config_map,
        "default",
        label_selector="a=b",
        resource_version=str(int(made.metadata.resource_version) - 1),
    )
    seen = [(event["type"], event["object"].data) for event in itertools.islice(stream, 3)]
    assert seen == [("ADDED", None), ("MODIFIED", {"x": "1"}), ("DELETED", {"x": "1"})]


def test_a_deployment_restarts_rolls_and_is_reached_by_its_service(cluster: Cluster, clients: Clients) -> None:
    script = "echo $WORD > word; exec python -m http.server 8000 --bind 0.0.0.0"
    probe = {"httpGet": {"path": "/word", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5}
    body = deployment(
        script,
        2,
        env=[{"name": "WORD", "value": "first"}],
        ports=[{"name": "http", "containerPort": 8000}],
        readinessProbe=probe,
    )
    clients.apps.create_namespaced_deployment("default", body)
    service = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}
    clients.core.create_namespaced_service("default", {"metadata": {"name": "web"}, "spec": service})
    until_now(lambda: len(ready_pods(cluster)) == 2, cluster.said())
    address = clients.core.read_namespaced_service("web", "default").spec.cluster_ip

    def word() -> str:
        with urllib.request.urlopen(f"http://{address}/word", timeout=30) as answer:
            return str(answer.read().decode().strip())

    assert until_now(word) == "first"
    cluster.lose(ready_pods(cluster)[0])
    until_now(
        lambda: any(
            status["restartCount"] == 1 and status["ready"]
            for pod in cluster.pods("app=web")
            for status in pod["status"]["containerStatuses"]
        )
    )
    change = {
        "spec": {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "WORD", "value": "second"}]}]}}}
    }
    clients.apps.patch_namespaced_deployment("web", "default", change)
    fewest = 2

    def rolled() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(ready_pods(cluster)))
        status = clients.apps.read_namespaced_deployment("web", "default").status
        return (
            status.observed_generation == 2 and status.updated_replicas == status.replicas == 2 == status.ready_replicas
        )

    until_now(rolled)
    assert fewest >= 2, "as many as before were ready all the time"
    until_now(lambda: _tried(word) == "second", "nodes to hear of the pods that have gone")
    script = "import urllib.request as u; print(u.urlopen('http://web.default.svc/word').read())"
    clients.batch.create_namespaced_job("default", job("asks", "", {"command": ["python", "-c", script]}))
    assert finished(clients, "asks").succeeded == 1, cluster.said()


def _tried(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except OSError:
        return ""


@pytest.mark.parametrize("lingers", [True, False])
def test_connections_still_arrive_for_a_moment_at_a_pod_that_leaves(
    cluster: Cluster, clients: Clients, lingers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that does not linger loses them."""
    if not lingers:
        monkeypatch.setattr(services, "LATE_SECONDS", PATIENCE_SECONDS)
    more = {"lifecycle": {"preStop": {"exec": {"command": ["sleep", "2"]}}}} if lingers else {}
    probe = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    script = "exec python -m http.server 8000 --bind 0.0.0.0"
    clients.apps.create_namespaced_deployment("default", deployment(script, 2, readinessProbe=probe, **more))
    service = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]}
    clients.core.create_namespaced_service("default", {"metadata": {"name": "web"}, "spec": service})
    until_now(lambda: len(ready_pods(cluster)) == 2, cluster.said())
    address = clients.core.read_namespaced_service("web", "default").spec.cluster_ip
    leaving = ready_pods(cluster)[0]

    def asked() -> str:
        with urllib.request.urlopen(f"http://{address}/", timeout=30):
            return "answered"

    until_now(lambda: _tried(asked))
    cluster.delete("Pod", leaving)
    answers = []
    while cluster.store.get("Pod", "default", leaving) is not None:
        answers.append(_tried(asked))
    answers.extend(_tried(asked) for _ in range(4))
    assert all(answers) == lingers


def test_a_container_that_is_not_live_is_restarted(cluster: Cluster, clients: Clients) -> None:
    probe = {
        "exec": {"command": ["test", "-e", "/state/live"]},
        "periodSeconds": 1,
        "failureThreshold": 2,
        "timeoutSeconds": 30,
    }
    script = "[ -e /state/once ] && touch /state/live; touch /state/once; exec sleep 1000"
    body = deployment(script, livenessProbe=probe, volumeMounts=[{"name": "state", "mountPath": "/state"}])
    body["spec"]["template"]["spec"]["volumes"] = [{"name": "state", "emptyDir": {}}]
    clients.apps.create_namespaced_deployment("default", body)
    [status] = until_now(
        lambda: [
            one
            for pod in cluster.pods("app=web")
            for one in pod["status"].get("containerStatuses", ())
            if one["restartCount"] == 1 and one["ready"]
        ]
    )
    assert status["lastState"]["terminated"]["message"] == "Liveness probe failed"


def test_a_service_account_may_what_its_roles_say(cluster: Cluster, clients: Clients) -> None:
    clients.core.create_namespaced_service_account("default", {"metadata": {"name": "runs"}})
    token = cluster.rights.token("default", "runs")
    path = cluster.folder / "runs"
    path.write_text(cluster.config_of(token))
    with config.new_client_from_config(str(path)) as api:
        own = client.BatchV1Api(api)
        with pytest.raises(ApiException, match="403"):
            own.list_namespaced_job("default")
        group = "rbac.authorization.k8s.io"
        rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list"]}]
        rbac = client.RbacAuthorizationV1Api(clients.core.api_client)
        rbac.create_namespaced_role("default", {"metadata": {"name": "looks"}, "rules": rules})
        binding = {
            "metadata": {"name": "looks"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "looks"},
            "subjects": [{"kind": "ServiceAccount", "name": "runs", "namespace": "default"}],
        }
        rbac.create_namespaced_role_binding("default", binding)
        assert own.list_namespaced_job("default").items == []
        with pytest.raises(ApiException, match="403"):
            own.delete_namespaced_job("x", "default")


def test_nothing_is_left_when_a_cluster_ends(cluster: Cluster, clients: Clients) -> None:
    clients.batch.create_namespaced_job("default", job("stays", "setsid sleep 1000 & trap '' TERM; sleep 1000"))
    [pid] = until_now(lambda: list(cluster.processes(only_pod(cluster, "stays")).values()))
    until_now(lambda: len(psutil.Process(pid).children()) == 2)
    processes = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(cluster.folder) not in mounts
    cluster.close()
    assert all(ended(one) for one in processes)


def test_a_container_that_has_ended_is_not_taken_for_a_later_one(cluster: Cluster, tmp_path: Path) -> None:
    """The system gives the number of a namespace that is gone to the next one."""

    def started(name: str, *command: str) -> Process:
        return Process(tmp_path / name, command, dict(os.environ), [], tmp_path / f"{name}.log", cwd="/")

    first = started("first", "true")
    until_now(lambda: first.poll() is not None)
    later = started("later", "sleep", "1000")
    first.kill()
    another = started("another", "sleep", "1000")
    first.kill()
    assert (later.poll(), another.poll()) == (None, None)
    later.kill()
    another.kill()
