"""What the chart renders is valid for Kubernetes, and for the operators whose objects it makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import orjson
import pytest
import yaml
from helm_python import lint

from tests.helm.chart import NAMESPACE, PATH, SCENARIOS, Manifest, chart, manifests, of_kind, texts
from tests.helm.launched import run_job

VERSIONS = ("1.29", "1.37")
"""The oldest and the newest that are supported."""

CUSTOM: dict[str, tuple[str, Any]] = {
    "ScaledObject": (
        "keda.sh/v1alpha1",
        {
            "scaleTargetRef",
            "minReplicaCount",
            "maxReplicaCount",
            "pollingInterval",
            "cooldownPeriod",
            "fallback",
            "triggers",
        },
    ),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "hostnames", "rules"}),
    "Route": ("route.openshift.io/v1", {"host", "path", "to", "port", "tls"}),
    "CiliumNetworkPolicy": ("cilium.io/v2", {"endpointSelector", "egress"}),
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "PrometheusRule": ("monitoring.coreos.com/v1", {"groups"}),
}
"""Kinds of operators, which Kubernetes has no schema of: apiVersion and the fields of spec."""

_valid: set[tuple[str, bytes]] = set()


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """The library reads all definitions of a version again for each manifest, which takes longer than to validate."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def check(manifest: Manifest, version: str) -> None:
    """Validates strictly; what was valid before is not looked at again."""
    key = (version, orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS))
    if key not in _valid:
        kubernetes_validate.validate(manifest, version, strict=True)
        _valid.add(key)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_manifest_is_valid(scenario: str, version: str) -> None:
    objects = manifests(SCENARIOS[scenario])
    for manifest in objects:
        if manifest["kind"] not in CUSTOM:
            check(manifest, version)
    check(run_job(objects), version)
    for executor in [one["data"]["executor.yaml"] for one in objects if "executor.yaml" in one.get("data", {})]:
        pod = yaml.safe_load(executor)
        pod["spec"]["containers"][0]["image"] = "set by Spark"
        check(pod, version)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_of_operators_have_their_shape(scenario: str) -> None:
    for manifest in manifests(SCENARIOS[scenario]):
        if manifest["kind"] in CUSTOM:
            api, fields = CUSTOM[manifest["kind"]]
            assert manifest["apiVersion"] == api
            assert manifest["spec"].keys() <= fields, manifest["kind"]


def test_every_kind_of_operators_is_rendered_somewhere() -> None:
    rendered = {one["kind"] for values in SCENARIOS.values() for one in manifests(values)}
    assert CUSTOM.keys() < rendered
    assert {"HorizontalPodAutoscaler", "Ingress", "PersistentVolumeClaim", "StatefulSet"} < rendered


def test_a_wrong_manifest_is_found() -> None:
    service = next(iter(of_kind(manifests(SCENARIOS["kind"]), "Service").values()))
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**service, "spec": {**service["spec"], "port": 1}}, VERSIONS[0])


@pytest.mark.parametrize("scenario", ["kind", "everything", "gateway"])
def test_lint_finds_nothing(scenario: str) -> None:
    report = lint(PATH, SCENARIOS[scenario], strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("scenario", ["everything", "trial with Spark"])
def test_names_are_unique_and_short_enough(scenario: str) -> None:
    objects = manifests(SCENARIOS[scenario], release="a-release-with-a-name-as-long-as-helm-lets-it-be-here")
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)
    assert all(one["metadata"]["namespace"] == NAMESPACE for one in objects)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_keys_stand_once(scenario: str) -> None:
    """YAML would take the last of two without a word."""
    for name, text in texts(SCENARIOS[scenario]).items():
        if name.endswith(".yaml"):
            list(yaml.load_all(text, Loader=_Strict))
    for one in of_kind(manifests(SCENARIOS[scenario]), "ConfigMap").values():
        for key, content in one["data"].items():
            if key.endswith(".yaml"):
                yaml.load(content, Loader=_Strict)


class _Strict(yaml.CSafeLoader):
    """Refuses a key that stands twice in a mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{keys} at {node.start_mark}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_labels_are_those_that_kubernetes_recommends(scenario: str) -> None:
    for manifest in manifests(SCENARIOS[scenario]):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "trial"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels.get("team") == SCENARIOS[scenario].get("commonLabels", {}).get("team")


def test_notes_say_where_to_go() -> None:
    notes = texts(SCENARIOS["kind"])["noetl-dagster/templates/NOTES.txt"]
    assert "helm test trial -n data" in notes
    assert "port-forward service/trial-noetl-dagster-webserver 3000" in notes
    assert "trial-noetl-dagster-trial" in notes
    assert "provision-1" in notes
    assert "https://dagster.example.com" in texts(SCENARIOS["gke"])["noetl-dagster/templates/NOTES.txt"]


def test_the_chart_is_packed_without_what_helm_ignores() -> None:
    assert {one["name"] for one in chart().files} == {
        ".helmignore",
        "README.md",
        "files/alerts.yaml",
        "values-eks.yaml",
        "values-gke.yaml",
        "values-kind.yaml",
        "values-oauth2-proxy.yaml",
    }
