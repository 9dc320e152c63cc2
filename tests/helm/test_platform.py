"""What a platform team says of every pod, of Services and of Ingresses reaches all of them."""

from __future__ import annotations

from typing import Any

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
            *(
                one["spec"]["template"]
                for one in objects
                if one["kind"] in ("Deployment", "StatefulSet", "Job")
            ),
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
        asked = {**(stated["labels"] if component != "test" else {}), **values["commonLabels"]}
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


def test_labels_of_values_do_not_undo_those_that_select() -> None:
    taken = {"app.kubernetes.io/component": "mine"}
    objects = manifests(overlaid(KIND, {"pod": {"labels": taken}}))
    for deployment in of_kind(objects, "Deployment").values():
        selected = deployment["spec"]["selector"]["matchLabels"]
        assert selected.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


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
