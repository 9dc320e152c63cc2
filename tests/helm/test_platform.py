"""What a platform team says of every pod, of Services and of Ingresses reaches all of them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import yaml

from tests.helm.chart import KIND, SCENARIOS, Manifest, Pods, manifests, of_kind, overlaid, pods_of
from tests.helm.launched import run_job, run_pods

FUSE = "gke-gcsfuse/volumes"


def executors(objects: list[Manifest]) -> Manifest:
    """The pod that Spark starts its executors from."""
    (text,) = (one["data"]["executor.yaml"] for one in objects if "executor.yaml" in one.get("data", {}))
    pod: Manifest = yaml.safe_load(text)
    return pod


def templates(objects: list[Manifest]) -> dict[str, Manifest]:
    """Every pod by its component, those that Dagster and Spark start included."""
    found = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one
        for one in [
            *(one for one in objects if one["kind"] == "Pod"),
            *(one["spec"]["template"] for one in objects if one["kind"] in ("Deployment", "StatefulSet", "Job")),
            run_job(objects)["spec"]["template"],
            executors(objects),
        ]
    }
    assert {"provision", "test", "run", "executor", "webserver", "worker-default"} <= found.keys()
    return found


def test_every_pod_has_what_values_say_of_pods() -> None:
    values = overlaid(
        SCENARIOS["everything"], {"pod": {"annotations": {"own": "yes"}}, "postgresql": {"enabled": True}}
    )
    objects = manifests(values)
    stated = values["pod"]
    for component, pod in templates(objects).items():
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        (container,) = spec["containers"]
        asked = {**stated["labels"], **values["commonLabels"]}
        assert labels.items() >= asked.items(), component
        assert pod["metadata"]["annotations"]["own"] == "yes", component
        for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert spec[field] == stated[field], (component, field)
        assert spec["imagePullSecrets"] == values["image"]["pullSecrets"], component
        assert stated["extraEnv"][0] in container["env"], component
        assert stated["extraEnvFrom"][0] in container["envFrom"], component
        assert stated["extraVolumes"][0] in spec["volumes"], component
        assert stated["extraVolumeMounts"][0] in container["volumeMounts"], component


def test_the_jobs_of_runs_have_the_labels_of_every_object() -> None:
    job = run_job(manifests(overlaid(KIND, {"commonLabels": {"team": "data"}})))
    assert job["metadata"]["labels"]["team"] == "data"


def test_gcsfuse_is_asked_for_where_the_volume_is_mounted() -> None:
    objects = manifests(SCENARIOS["gke"])
    asking = set()
    for component, pod in templates(objects).items():
        mounted = any(volume["name"] == "shared" for volume in pod["spec"]["volumes"])
        assert (pod["metadata"].get("annotations", {}).get(FUSE) == "true") == mounted, component
        if mounted:
            asking.add(component)
    assert {"run", "executor", "api", "worker-large", "code-location"} <= asking
    others = templates(manifests(SCENARIOS["eks"]))
    assert not [name for name, pod in others.items() if FUSE in pod["metadata"].get("annotations", {})]


def test_a_step_s_own_annotations_leave_the_volume_s() -> None:
    asked: dict[str, Any] = {"pod_template_spec_metadata": {"annotations": {"own": "yes"}}}
    template = run_job(manifests(SCENARIOS["gke"]), asked)["spec"]["template"]
    assert template["metadata"]["annotations"].items() >= {FUSE: "true", "own": "yes"}.items()


def test_services_have_their_type_annotations_and_labels() -> None:
    own = {"type": "LoadBalancer", "annotations": {"load-balancer": "internal"}, "labels": {"edge": "yes"}}
    values = overlaid(KIND, {"api": {"service": own}, "dagster": {"webserver": {"service": own}}})
    services = of_kind(manifests(values), "Service")
    for name, service in services.items():
        asked = name.endswith(("-api", "-webserver"))
        assert (service["spec"].get("type") == "LoadBalancer") == asked, name
        assert (service["metadata"].get("annotations") == own["annotations"]) == asked, name
        assert (service["metadata"]["labels"].get("edge") == "yes") == asked, name


def test_each_ingress_has_annotations_of_its_own() -> None:
    ingress = {
        "enabled": True,
        "annotations": {"both": "yes", "timeout": "60"},
        "webserver": {"host": "dagster.example.com", "annotations": {"login": "oauth"}},
        "api": {"host": "api.example.com", "annotations": {"timeout": "300"}},
    }
    found = of_kind(manifests(overlaid(KIND, {"ingress": ingress})), "Ingress")
    stated = {name.rpartition("-")[2]: one["metadata"]["annotations"] for name, one in found.items()}
    assert stated == {
        "webserver": {"both": "yes", "timeout": "60", "login": "oauth"},
        "api": {"both": "yes", "timeout": "300"},
    }


def test_names_of_values_take_the_place_of_the_release_s() -> None:
    named = manifests(overlaid(KIND, {"nameOverride": "flows"}))
    assert all(one["metadata"]["name"].startswith("trial-flows") for one in named)
    assert {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in named} == {"flows"}
    whole = manifests(overlaid(KIND, {"fullnameOverride": "flows"}))
    assert all(one["metadata"]["name"].startswith("flows-") for one in whole)
    pods: list[Pods] = [*pods_of(whole), run_pods(whole)]
    assert not [pod.name for pod in pods if "trial-noetl-dagster" in str(pod.spec)]


def test_tls_is_of_the_ingress_whose_host_it_names() -> None:
    ingress = {
        "enabled": True,
        "webserver": {"host": "dagster.example.com"},
        "api": {"host": "api.example.com"},
        "tls": [
            {"secretName": "ui", "hosts": ["dagster.example.com"]},
            {"secretName": "api", "hosts": ["api.example.com"]},
            {"secretName": "both", "hosts": ["api.example.com", "dagster.example.com"]},
            {"secretName": "any"},
        ],
    }
    found = of_kind(manifests(overlaid(KIND, {"ingress": ingress})), "Ingress")
    secrets = {name: [one["secretName"] for one in about["spec"]["tls"]] for name, about in found.items()}
    assert secrets == {
        "trial-noetl-dagster-webserver": ["ui", "both", "any"],
        "trial-noetl-dagster-api": ["api", "both", "any"],
    }


def test_long_names_that_begin_alike_stay_apart() -> None:
    long = "a-team-with-a-long-name-and-a-longer-project"
    names = {release: of_kind(manifests(KIND, release=release), "Service") for release in (long, f"{long}-2")}
    assert not names[long].keys() & names[f"{long}-2"].keys()
    assert all(name.startswith(long[:33]) for found in names.values() for name in found)
    overridden = [{"nameOverride": f"{long}-{number}"} for number in (1, 2)]
    labels = {
        one["metadata"]["labels"]["app.kubernetes.io/name"]
        for values in overridden
        for one in manifests(overlaid(KIND, values))
    }
    assert len(labels) == 2


USERS = ("runAsUser", "runAsGroup", "fsGroup")


def test_users_are_those_of_values_or_the_cluster_s() -> None:
    """OpenShift gives each namespace users of its own, and refuses pods that name others."""
    base = overlaid(SCENARIOS["everything"], {"postgresql": {"enabled": True}})
    nobody = {"pod": {"securityContext": dict.fromkeys((*USERS, "fsGroupChangePolicy"))}}
    for component, pod in templates(manifests(overlaid(base, nobody))).items():
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["spec"]["securityContext"] == context, component
    stated = {
        "pod": {"securityContext": {"runAsUser": 1000, "fsGroup": None, "supplementalGroups": [7]}},
        "runs": {"pod": {"securityContext": {"runAsUser": 2000}}},
        "spark": {"executors": {"pod": {"securityContext": {"runAsUser": None}}}},
    }
    for component, pod in templates(manifests(overlaid(base, stated))).items():
        context = pod["spec"]["securityContext"]
        users = {"run": 2000, "postgresql": 999, "executor": None}
        assert context.get("runAsUser") == users.get(component, 1000), component
        assert context["runAsGroup"] == (999 if component == "postgresql" else 10001), component
        assert "fsGroup" not in context
        assert context["supplementalGroups"] == [7]
        assert context["runAsNonRoot"] is True


def test_executors_go_where_their_own_values_say() -> None:
    own = {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "spark", "operator": "Exists"}],
        "labels": {"cost": "spark"},
        "extraEnv": [{"name": "OWN", "value": "1"}],
    }
    values = {"pod": {"nodeSelector": {"pool": "data"}}, "spark": {"mode": "kubernetes"}}
    pod = executors(manifests(overlaid(KIND, values, {"spark": {"executors": {"pod": own}}})))
    assert pod["spec"]["nodeSelector"] == {"pool": "data", "disk": "fast"}
    assert pod["spec"]["tolerations"] == own["tolerations"]
    assert pod["metadata"]["labels"]["cost"] == "spark"
    assert own["extraEnv"][0] in pod["spec"]["containers"][0]["env"]


DIGEST = f"sha256:{'2' * 64}"


@pytest.mark.parametrize(
    ("image", "executors", "expected"),
    [
        ({}, {}, "ghcr.io/noetl/noetl-dagster-spark:0.1.0"),
        ({"repository": "own.io/flows", "tag": "7"}, {}, "own.io/flows-spark:7"),
        ({"repository": "own.io/flows", "tag": "7"}, {"repository": "own.io/s", "tag": "8"}, "own.io/s:8"),
        ({"tag": "7"}, {"digest": DIGEST}, f"ghcr.io/noetl/noetl-dagster-spark@{DIGEST}"),
    ],
)
def test_executors_have_the_image_that_belongs_to_the_platform_s(
    image: dict[str, str], executors: dict[str, str], expected: str
) -> None:
    values = {"image": image, "spark": {"mode": "kubernetes", "executors": {"image": executors}}}
    run = run_pods(manifests(overlaid(KIND, values)))
    [config] = [one["value"] for one in run.container["env"] if one["name"] == "NOETL_SPARK_CONFIG"]
    assert orjson.loads(config)["spark.kubernetes.container.image"] == expected
