"""What Helm does in which order: provisioning, the test, and Dagster's own chart beside this one."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import yaml

from tests.conftest import PROJECT
from tests.helm.chart import (
    KIND,
    MINIMAL,
    SCENARIOS,
    Manifest,
    chart,
    component,
    manifests,
    of_kind,
    overlaid,
)

TRIALS = {"kind", "dagster elsewhere", "trial with Spark", "only NATS"}


def hook(manifest: Manifest) -> str:
    return manifest["metadata"].get("annotations", {}).get("helm.sh/hook", "")


@pytest.mark.parametrize("scenario", sorted(SCENARIOS.keys() - TRIALS - {"bare"}))
def test_provisioning_comes_first_and_brings_what_it_needs(scenario: str) -> None:
    """Before an install there is nothing else of the release: what the Job names is a hook of an earlier weight."""
    objects = manifests(SCENARIOS[scenario])
    hooks = [one for one in objects if hook(one) == "pre-install,pre-upgrade"]
    (job,) = (one for one in hooks if one["kind"] == "Job")
    pods = component(objects, "provision")
    assert pods.container["args"][:2] == ["noetl-dagster", "provision"]
    before = {
        one["metadata"]["name"]
        for one in hooks
        if int(one["metadata"]["annotations"]["helm.sh/hook-weight"])
        < int(job["metadata"]["annotations"]["helm.sh/hook-weight"])
    }
    maps = {source["configMapRef"]["name"] for source in pods.container["envFrom"] if "configMapRef" in source}
    maps |= {volume["configMap"]["name"] for volume in pods.spec["volumes"] if "configMap" in volume}
    given = {"proxies", "certificates"}
    assert {*maps, pods.spec["serviceAccountName"]} - given == before
    [policy] = (
        one
        for one in of_kind(objects, "NetworkPolicy").values()
        if one["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component") == "provision"
    )
    assert policy["metadata"]["name"] in before, "it would go through the last revision's"
    assert policy in hooks
    assert pods.spec["restartPolicy"] == "Never"
    assert all("persistentVolumeClaim" not in volume for volume in pods.spec["volumes"])
    both = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(both) == len(set(both))  # else Helm would delete one with the other


@pytest.mark.parametrize("scenario", sorted(TRIALS))
def test_provisioning_of_a_trial_is_no_hook(scenario: str) -> None:
    """Its servers come with the release: a hook before would wait for them for ever, one after for ``--wait``."""
    objects = manifests(SCENARIOS[scenario])
    assert {hook(one) for one in objects} == {"", "test"}
    assert component(objects, "provision").spec["restartPolicy"] == "OnFailure"


def test_each_revision_provisions_anew() -> None:
    """A Job cannot be changed; the next revision's has another name, and Helm removes the last one's."""
    names = set()
    for revision in (1, 2):
        text = chart().render(KIND, name="trial", namespace="data", revision=revision)[
            "noetl-dagster/templates/provision.yaml"
        ]
        (job,) = (one for one in yaml.safe_load_all(text) if one)
        names.add(job["metadata"]["name"])
    assert names == {"trial-noetl-dagster-provision-1", "trial-noetl-dagster-provision-2"}


def test_provisioning_may_be_left_to_others() -> None:
    assert not [one for one in manifests(SCENARIOS["bare"]) if one["kind"] == "Job"]


def test_provisioning_has_the_instance_and_the_settings_of_the_release() -> None:
    maps = of_kind(manifests(MINIMAL), "ConfigMap")
    own = maps["trial-noetl-dagster-provision"]["data"]
    assert own.pop("dagster.yaml") == maps["trial-noetl-dagster-instance"]["data"]["dagster.yaml"]
    assert own == maps["trial-noetl-dagster-settings"]["data"]


def test_helm_test_asks_the_doctor_and_the_api() -> None:
    (pod,) = (one for one in manifests(KIND) if hook(one) == "test")
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert container["command"] == ["/bin/sh", "-ec"]
    script = container["args"][0]
    assert script.startswith("noetl-dagster doctor\n")
    assert "/ready" in script
    compile(script.split("python -c '")[1].rsplit("'", 1)[0], "test", "exec")
    elsewhere = manifests(SCENARIOS["API elsewhere"])
    assert "/ready" not in component(elsewhere, "test").container["args"][0]


def on_the_page(title: str) -> dict[str, Any]:
    """Values that the guide shows."""
    page = (PROJECT / "docs" / "how-to" / "kubernetes.md").read_text()
    section = page.split("## With Dagster's own chart")[1]
    block = section.split(f'```yaml title="{title}"\n')[1].split("```")[0]
    found: dict[str, Any] = yaml.safe_load(textwrap.dedent(block))
    return found


def test_dagster_s_own_chart_gets_what_ours_would_have() -> None:
    """Its code location has our settings, secrets and image, and our API knows where it is."""
    ours = on_the_page("values.yaml")
    objects = manifests(ours)
    (deployment,) = on_the_page("dagster-values.yaml")["dagster-user-deployments"]["deployments"]
    assert [one["name"] for one in deployment["envConfigMaps"]] == ["noetl-settings"]
    assert "noetl-settings" in of_kind(objects, "ConfigMap")
    code = component(manifests(overlaid(ours, {"dagster": {"enabled": True}})), "code-location")
    assert deployment["env"] == [one for one in code.container["env"] if "valueFrom" in one]
    assert f"{deployment['image']['repository']}:{deployment['image']['tag']}" == code.container["image"]
    assert code.container["args"][-2:] == deployment["dagsterApiGrpcArgs"]
    (location,) = ours["dagster"]["extraLocations"]
    assert (location["host"], location["port"]) == (deployment["name"], deployment["port"])
    workspace = yaml.safe_load(of_kind(objects, "ConfigMap")["noetl-workspace"]["data"]["workspace.yaml"])
    assert workspace == {"load_from": [{"grpc_server": location}]}
    components = {pods.get("app.kubernetes.io/component") for pods in (one["metadata"]["labels"] for one in objects)}
    assert not components & {"webserver", "daemon", "code-location"}


@pytest.mark.parametrize("scenario", sorted(SCENARIOS.keys() - {"bare"}))
def test_provisioning_is_told_of_the_shared_volume_only_with_it(scenario: str) -> None:
    objects = manifests(SCENARIOS[scenario])
    pods = component(objects, "provision")
    mounted = {mount["mountPath"] for mount in pods.container["volumeMounts"]}
    assert {pods.variables(objects).get("NOETL_PVC_MOUNT_PATH")} - {None} <= mounted


def test_labels_of_monitoring_are_those_of_its_objects() -> None:
    labels = {"release": "prometheus"}
    monitored = {
        "serviceMonitor": {"enabled": True, "labels": labels},
        "rules": {"enabled": True, "labels": labels},
    }
    objects = manifests(overlaid(SCENARIOS["kind"], {"monitoring": monitored}))
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    found = [one for one in objects if one["kind"] in kinds]
    assert len(found) == len(kinds)
    assert all(labels.items() <= one["metadata"]["labels"].items() for one in found)


def test_the_test_has_its_pod_s_annotations() -> None:
    objects = manifests(overlaid(SCENARIOS["kind"], {"pod": {"annotations": {"gke-gcsfuse/volumes": "true"}}}))
    (pod,) = (one for one in objects if hook(one) == "test")
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
