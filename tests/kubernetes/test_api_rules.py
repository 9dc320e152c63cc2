"""What the stand-in refuses as a real API server does: names, conflicts of managers, versions that are too old."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.failures import Refused
from tests.waiting import until_now

Manifest = dict[str, Any]


@pytest.fixture
def api(cluster: Cluster) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(cluster.kubeconfig)) as found:
        yield found


def pod(**more: Any) -> Manifest:
    main = {"name": "main", "image": "busybox", "command": ["true"], **more.pop("container", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", **more.pop("metadata", {})},
        "spec": {"containers": [main], **more},
    }


def of(kind: str, name: str, **more: Any) -> Manifest:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **more}


MOUNTS = [{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/a"}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (of("Service", "1st", spec={"ports": [{"port": 1}]}), "metadata.name"),
        (of("Service", "a.b", spec={"ports": [{"port": 1}]}), "metadata.name"),
        (of("Service", "a" * 64, spec={"ports": [{"port": 1}]}), "metadata.name"),
        (of("Namespace", "a.b"), "metadata.name"),
        (of("ConfigMap", "Upper"), "metadata.name"),
        (of("ConfigMap", "a..b"), "metadata.name"),
        (of("ConfigMap", "a", data={"a/b": "c"}), "data"),
        (pod(metadata={"labels": {"a b": "c"}}), "no name of a label"),
        (pod(metadata={"labels": {"A.Example/b": "c"}}), "no name of a label"),
        (pod(metadata={"labels": {"a": "b c"}}), "no value of a label"),
        (pod(metadata={"annotations": {"-a": "b"}}), "no name of an annotation"),
        (pod(container={"name": "Main"}), "containers: 'Main'"),
        (pod(container={"env": [{"name": "a b"}]}), "env: 'a b'"),
        (pod(container={"ports": [{"name": "a-name-of-17-long", "containerPort": 1}]}), "ports"),
        (pod(container={"ports": [{"name": "8080", "containerPort": 1}]}), "ports"),
        (pod(initContainers=[{"name": "main", "image": "busybox"}]), "containers: Duplicate value"),
        (pod(volumes=[{"name": "a.b", "emptyDir": {}}]), "volumes: 'a.b'"),
        (pod(volumes=[{"name": "a", "emptyDir": {}}], container={"volumeMounts": MOUNTS}), "must be unique"),
    ],
)
def test_names_that_kubernetes_refuses(cluster: Cluster, given: Manifest, said: str) -> None:
    with pytest.raises(Refused, match=said):
        cluster.create(given)


SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
WHOLE = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize(
    ("own", "whole", "more", "said"),
    [
        (SAFE, WHOLE, {}, ""),
        ({**SAFE, **WHOLE}, {}, {}, ""),
        ({}, WHOLE, {}, "allowPrivilegeEscalation != false"),
        ({**SAFE, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}, WHOLE, {}, "unrestricted capabilities"),
        ({**SAFE, "privileged": True}, WHOLE, {}, "privileged"),
        (SAFE, {**WHOLE, "runAsNonRoot": None}, {}, "runAsNonRoot != true"),
        (SAFE, {**WHOLE, "runAsUser": 0}, {}, "runAsUser=0"),
        (SAFE, {"runAsNonRoot": True}, {}, "seccompProfile"),
        (SAFE, WHOLE, {"hostNetwork": True}, "host namespaces"),
        (SAFE, WHOLE, {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, 'restricted volume type "hostPath"'),
    ],
)
def test_a_restricted_namespace_takes_restricted_pods(
    cluster: Cluster, own: Manifest, whole: Manifest, more: Manifest, said: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "safe", "labels": labels}})
    until_now(lambda: cluster.store.get("ServiceAccount", "safe", "default"))
    given = pod(metadata={"namespace": "safe"}, container={"securityContext": own}, securityContext=whole, **more)
    if not said:
        cluster.create(given)
        return
    with pytest.raises(Refused, match=f'pods "p" is forbidden: violates PodSecurity .*{said}'):
        cluster.create(given)


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        ({"pods": "2", "requests.memory": "200Mi"}, ""),
        ({"pods": "1"}, "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1"),
        ({"requests.memory": "150Mi"}, "exceeded quota: q, requested: requests.memory="),
        ({"limits.cpu": "4"}, "failed quota: q: must specify limits.cpu"),
    ],
)
def test_a_quota_admits_so_much(cluster: Cluster, hard: Manifest, said: str) -> None:
    asked = {"resources": {"requests": {"memory": "100Mi"}}}
    cluster.create(pod(metadata={"name": "first"}, container={**asked, "command": ["sleep", "1000"]}))
    cluster.create(of("ResourceQuota", "q", spec={"hard": hard}))
    if not said:
        cluster.create(pod(container=asked))
        return
    with pytest.raises(Refused, match=said):
        cluster.create(pod(container=asked))


WEB: Manifest = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: main, image: "busybox:1", command: [sleep, "1000"], env: [{name: A, value: "1"}]}]}
""")


def applied(api: client.ApiClient, given: Manifest, manager: str = "helm", *, force: bool = False) -> Any:
    apps = client.AppsV1Api(api)
    return apps.patch_namespaced_deployment(
        "web",
        "default",
        given,
        field_manager=manager,
        force=force,
        _content_type="application/apply-patch+yaml",
    )


def with_(replicas: int | None = 2, image: str = "busybox:1") -> Manifest:
    found = copy.deepcopy(WEB)
    found["spec"]["template"]["spec"]["containers"][0]["image"] = image
    if replicas is None:
        del found["spec"]["replicas"]
    else:
        found["spec"]["replicas"] = replicas
    return found


def scaled(api: client.ApiClient, count: int) -> None:
    body = {"spec": {"replicas": count}}
    client.AppsV1Api(api).patch_namespaced_deployment_scale("web", "default", body, field_manager="kubectl")


def test_an_applier_conflicts_with_who_has_scaled(api: client.ApiClient) -> None:
    """As Helm 4 does after ``kubectl scale``."""
    applied(api, WEB)
    scaled(api, 5)
    assert client.AppsV1Api(api).read_namespaced_deployment_scale("web", "default").spec.replicas == 5
    with pytest.raises(ApiException) as raised:
        applied(api, with_(image="busybox:2"))
    assert raised.value.status == 409
    assert 'Apply failed with 1 conflict: conflicts with \\"kubectl\\": .spec.replicas' in raised.value.body
    assert applied(api, with_(5, "busybox:2")).spec.replicas == 5, "the same value is no conflict"
    scaled(api, 6)
    assert applied(api, with_(2), force=True).spec.replicas == 2
    assert applied(api, with_(3)).spec.replicas == 3, "the field is its own again"


def test_what_an_applier_leaves_out_stays_with_who_has_it(api: client.ApiClient) -> None:
    applied(api, with_(None))
    scaled(api, 5)
    assert applied(api, with_(None, "busybox:2")).spec.replicas == 5


def test_two_appliers_share_a_value_until_one_changes_it(api: client.ApiClient) -> None:
    applied(api, WEB)
    same = {
        **with_(None),
        "spec": {"replicas": 2, "selector": WEB["spec"]["selector"], "template": WEB["spec"]["template"]},
    }
    applied(api, same, "argocd")
    with pytest.raises(ApiException, match="Conflict"):
        applied(api, with_(4), "argocd")


def test_watches_and_pages_of_forgotten_versions_are_gone(cluster: Cluster, api: client.ApiClient) -> None:
    core = client.CoreV1Api(api)
    for number in range(5):
        core.create_namespaced_config_map("default", {"metadata": {"name": f"m{number}", "labels": {"own": "1"}}})
    page = core.list_namespaced_config_map("default", label_selector="own", limit=2)
    assert [one.metadata.name for one in page.items] == ["m0", "m1"]
    assert page.metadata.remaining_item_count == 3
    token = page.metadata._continue
    rest = core.list_namespaced_config_map("default", label_selector="own", _continue=token, limit=10)
    assert [one.metadata.name for one in rest.items] == ["m2", "m3", "m4"]
    assert rest.metadata._continue is None
    old = page.metadata.resource_version
    cluster.store.kept = 1
    for name in ("m5", "m6"):
        core.create_namespaced_config_map("default", {"metadata": {"name": name}})
    with pytest.raises(ApiException) as raised:
        core.list_namespaced_config_map("default", _continue=token, limit=2)
    assert raised.value.status == 410
    with pytest.raises(ApiException) as gone:
        list(watch.Watch().stream(core.list_namespaced_config_map, "default", resource_version=old, timeout_seconds=5))
    assert gone.value.status == 410


@pytest.mark.parametrize(
    ("whole", "starts"),
    [({"runAsNonRoot": True}, False), ({"runAsNonRoot": True, "runAsUser": 7}, True), ({"runAsUser": 0}, True)],
)
def test_an_image_of_root_does_not_start_where_root_is_refused(cluster: Cluster, whole: Manifest, starts: bool) -> None:
    cluster.create(pod(securityContext=whole, container={"command": ["sleep", "1000"]}))

    def state() -> Manifest:
        found = (cluster.pods()[0]["status"].get("containerStatuses") or [{"state": {}}])[0]["state"]
        return found if found.get("running") or "ConfigError" in str(found) else {}

    found = until_now(state)
    assert ("running" in found) == starts
    assert starts or "image will run as root" in found["waiting"]["message"]


def test_a_pod_without_containers_is_invalid_in_a_restricted_namespace_too(cluster: Cluster) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "safe", "labels": labels}})
    until_now(lambda: cluster.store.get("ServiceAccount", "safe", "default"))
    with pytest.raises(Refused, match="containers"):
        cluster.create(of("Pod", "p", spec={}) | {"metadata": {"name": "p", "namespace": "safe"}})
