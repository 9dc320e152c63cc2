"""Whatever a manifest names exists: Secrets, ConfigMaps, keys, Services, ports, volumes, accounts, settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from noetl_dagster.settings import Settings
from tests.conftest import PROJECT
from tests.helm.chart import (
    MINIMAL,
    SCENARIOS,
    Manifest,
    Pods,
    component,
    manifests,
    of_kind,
    overlaid,
    pods_of,
)
from tests.helm.launched import run_pods

GIVEN = {"noetl", "other", "playbook-secrets", "registry"}
"""Secrets that the scenarios say exist."""

GIVEN_MAPS = {"playbooks", "proxies", "certificates"}

_SERVICE = re.compile(r"(?:https?://|nats://[^@/]+@|@|^)([a-z0-9-]+):(\d+)")


@pytest.fixture(params=SCENARIOS)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests(SCENARIOS[request.param])


def all_pods(objects: list[Manifest]) -> list[Pods]:
    return [*pods_of(objects), run_pods(objects)]


def everywhere(value: Any, key: str) -> Iterator[Any]:
    """What stands under a key, however deep."""
    if isinstance(value, dict):
        for name, below in value.items():
            if name == key:
                yield below
            yield from everywhere(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from everywhere(below, key)


def test_secrets_are_given_or_made(objects: list[Manifest]) -> None:
    made = of_kind(objects, "Secret")
    for pods in all_pods(objects):
        for reference in everywhere(pods.spec, "secretKeyRef"):
            if reference["name"] in made:
                assert reference["key"] in made[reference["name"]]["data"], pods.name
            else:
                assert reference["name"] in GIVEN, pods.name
        for volume in everywhere(pods.spec, "secret"):
            assert volume["secretName"] == "api-tls", pods.name


def test_no_secret_is_in_clear(objects: list[Manifest]) -> None:
    for name in of_kind(objects, "Secret"):
        assert name.endswith("-trial")  # made in the cluster, of nothing that values say
    secret = {
        "NOETL_DB_URL",
        "NOETL_DAGSTER_DB_URL",
        "NOETL_NATS_URL",
        "NOETL_SERVICE_TOKENS",
        "NOETL_SERVER_TOKEN",
    }
    for pods in all_pods(objects):
        assert not secret & pods.variables(objects).keys()


def test_config_maps_and_their_keys_exist(objects: list[Manifest]) -> None:
    made = of_kind(objects, "ConfigMap")
    for pods in all_pods(objects):
        for reference in [*everywhere(pods.spec, "configMapRef"), *everywhere(pods.spec, "configMap")]:
            assert reference["name"] in {*made, *GIVEN_MAPS}, pods.name
            for item in reference.get("items", ()):
                assert item["key"] in made[reference["name"]]["data"]


def test_every_config_map_is_used(objects: list[Manifest]) -> None:
    named = {
        reference["name"]
        for pods in all_pods(objects)
        for key in ("configMapRef", "configMap")
        for reference in everywhere(pods.spec, key)
    }
    assert of_kind(objects, "ConfigMap").keys() <= named


def test_claims_exist(objects: list[Manifest]) -> None:
    for pods in all_pods(objects):
        for claim in everywhere(pods.spec, "persistentVolumeClaim"):
            assert claim["claimName"] in {*of_kind(objects, "PersistentVolumeClaim"), "shared", "playbooks"}


def test_mounts_have_volumes_and_volumes_mounts(objects: list[Manifest]) -> None:
    sets = of_kind(objects, "StatefulSet")
    for pods in all_pods(objects):
        volumes = [volume["name"] for volume in pods.spec["volumes"]]
        if pods.kind == "StatefulSet":
            volumes += [claim["metadata"]["name"] for claim in sets[pods.name]["spec"]["volumeClaimTemplates"]]
        mounted = [mount["name"] for mount in pods.container["volumeMounts"]]
        assert sorted(volumes) == sorted(mounted), pods.name
        paths = [mount["mountPath"] for mount in pods.container["volumeMounts"]]
        assert len(paths) == len(set(paths)), pods.name


def test_accounts_exist_and_may_only_be_named_where_they_are_made(objects: list[Manifest]) -> None:
    made = of_kind(objects, "ServiceAccount")
    for pods in all_pods(objects):
        assert pods.spec["serviceAccountName"] in {*made, "default", "runs"}, pods.name
    for binding in of_kind(objects, "RoleBinding").values():
        assert binding["roleRef"]["name"] in of_kind(objects, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= {*made, "default", "runs"}
    used = {pods.spec["serviceAccountName"] for pods in all_pods(objects)}
    others = {name for name in made if name.endswith(("-executor", "-container"))}  # of pods that Spark and steps make
    assert made.keys() - others <= used


def test_services_find_one_workload_and_its_ports(objects: list[Manifest]) -> None:
    for name, service in of_kind(objects, "Service").items():
        (found,) = (pods for pods in pods_of(objects) if service["spec"]["selector"].items() <= pods.labels.items())
        ports = {port["name"]: port["containerPort"] for port in found.container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], name


def test_selectors_find_one_workload(objects: list[Manifest]) -> None:
    workloads = [*of_kind(objects, "Deployment").values(), *of_kind(objects, "StatefulSet").values()]
    selecting = [*workloads, *of_kind(objects, "PodDisruptionBudget").values()]
    for one in selecting:
        labels = one["spec"]["selector"]["matchLabels"]
        found = [pods.name for pods in all_pods(objects) if labels.items() <= pods.labels.items()]
        assert found == [one["metadata"]["name"]]
    for workload in workloads:
        spread = workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ())
        assert all(one["labelSelector"] == workload["spec"]["selector"] for one in spread)


def test_what_scales_and_routes_exists(objects: list[Manifest]) -> None:
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for one in of_kind(objects, kind).values():
            target = of_kind(objects, "Deployment")[one["spec"]["scaleTargetRef"]["name"]]
            assert "replicas" not in target["spec"]  # an upgrade would undo what was scaled
    for ingress in of_kind(objects, "Ingress").values():
        for service in everywhere(ingress, "service"):
            ports = of_kind(objects, "Service")[service["name"]]["spec"]["ports"]
            assert service["port"]["number"] in {port["port"] for port in ports}


@pytest.mark.parametrize("scenario", ["gke", "eks"])
def test_a_pool_asks_for_a_worker_for_every_so_many_commands_as_it_has_slots(scenario: str) -> None:
    objects = manifests(SCENARIOS[scenario])
    asked = {}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for name, one in of_kind(objects, kind).items():
            for metric in one["spec"].get("metrics", ()):
                asked[name.rpartition("-")[2]] = metric["external"]["target"]["averageValue"]
            for trigger in one["spec"].get("triggers", ()):
                asked[name.rpartition("-")[2]] = trigger["metadata"]["threshold"]
    assert asked == {"default": "16", "large": "4"}


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_two_releases_of_a_namespace_scale_on_queues_of_their_own(kind: str) -> None:
    """Prometheus names the Service that it has scraped."""
    values = overlaid(MINIMAL, {"workers": {"defaults": {"autoscaling": {"kind": kind}}}})
    asked = {}
    for release in ("blue", "green"):
        objects = manifests(values, release=release)
        kinds = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
        [scaled] = of_kind(objects, kinds[kind]).values()
        [service] = (name for name in of_kind(objects, "Service") if name.endswith("-api"))
        spec = scaled["spec"]
        if kind == "keda":
            query = spec["triggers"][0]["metadata"]["query"]
            assert query.count(f'{{namespace="data",pool="default",service="{service}"}}') == 2
            asked[release] = query
        else:
            metrics = [one["external"]["metric"] for one in spec["metrics"]]
            wanted = {"namespace": "data", "pool": "default", "service": service}
            assert metrics == [{"name": "noetl_pool_commands", "selector": {"matchLabels": wanted}}]
            asked[release] = str(metrics)
    assert asked["blue"] != asked["green"]


def test_what_prometheus_scrapes_exists(objects: list[Manifest]) -> None:
    for monitor in of_kind(objects, "ServiceMonitor").values():
        selected = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (
            one for one in of_kind(objects, "Service").values() if selected.items() <= one["metadata"]["labels"].items()
        )
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
    for monitor in of_kind(objects, "PodMonitor").values():
        selected, (endpoint,) = (
            monitor["spec"]["selector"]["matchLabels"],
            monitor["spec"]["podMetricsEndpoints"],
        )
        found = [pods for pods in pods_of(objects) if selected.items() <= pods.labels.items()]
        named = [port["name"] for pods in found for port in pods.container.get("ports", ())]
        assert endpoint["port"] in named


def test_probes_ask_ports_of_the_container(objects: list[Manifest]) -> None:
    for pods in pods_of(objects):
        ports = pods.container.get("ports", ())
        named = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for asked in everywhere(pods.container.get(probe, {}), "port"):
                assert asked in named, pods.name


def test_settings_are_those_that_the_code_reads(objects: list[Manifest]) -> None:
    known = {f"NOETL_{name.upper()}" for name in Settings.model_fields} | SOON
    for pods in all_pods(objects):
        names = {one["name"] for one in pods.container["env"]} | pods.variables(objects).keys()
        ours = {name for name in names if name.startswith("NOETL_")}
        assert ours <= known, pods.name
        assert ours or not pods.is_ours


SOON = {"NOETL_RUN_LAUNCHER", "NOETL_WORKSPACE"}
"""Settings that the launcher of runs brings."""


def test_settings_are_read_as_they_are_written(objects: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, booleans and JSON: what a process makes of its environment."""
    for pods in all_pods(objects):
        if not pods.is_ours:
            continue
        with monkeypatch.context() as patched:
            for name, value in pods.variables(objects).items():
                patched.setenv(name, value)
            settings = Settings()
        assert not settings.embedded
        assert settings.home.is_absolute()
        if "NOETL_WORKER_TOOL_POOLS" in pods.variables(objects):
            assert settings.worker_tool_pools == {"postgres": 4}


def test_addresses_are_those_of_services(objects: list[Manifest]) -> None:
    """An address without a dot is a Service of the release."""
    ports = {
        (name, str(port["port"])) for name, one in of_kind(objects, "Service").items() for port in one["spec"]["ports"]
    }
    for pods in all_pods(objects):
        for name, value in pods.variables(objects).items():
            if name.startswith("NOETL_") and not name.startswith("NOETL_SPARK"):
                for address in _SERVICE.findall(value):
                    assert address in ports, f"{pods.name}: {name}={value}"


def test_runs_code_location_and_api_have_the_same_playbooks(objects: list[Manifest]) -> None:
    def playbooks(pods: Pods) -> list[Any]:
        return [volume for volume in pods.spec["volumes"] if volume["name"] == "playbooks"]

    wanted = playbooks(run_pods(objects))
    for pods in pods_of(objects):
        if pods.component in ("code-location", "api") or pods.component.startswith("worker-"):
            assert playbooks(pods) == wanted


def test_pools_are_named() -> None:
    objects = manifests(SCENARIOS["gke"])
    for pool in ("default", "large"):
        assert component(objects, f"worker-{pool}").variables(objects)["NOETL_WORKER_POOL"] == pool
    large = component(objects, "worker-large")
    assert large.variables(objects)["NOETL_WORKER_SLOTS"] == "4"
    assert large.container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "5Gi"}


def test_a_pool_may_have_no_workers_for_now() -> None:
    deployments = of_kind(manifests(SCENARIOS["paused"]), "Deployment")
    assert deployments["noetl-worker-default"]["spec"]["replicas"] == 0


def test_pods_follow_what_they_were_started_with() -> None:
    """A change of settings, of dagster.yaml, of the workspace or of playbooks replaces the pods that read them."""
    base = SCENARIOS["minimal"]
    changes: dict[str, tuple[dict[str, Any], set[str]]] = {
        "settings": (
            {"settings": {"NOETL_RETENTION_DAYS": 30}},
            {"webserver", "daemon", "code-location", "api", "ingest", "worker-default"},
        ),
        "dagster": ({"runs": {"maxConcurrent": 3}}, {"webserver", "daemon", "code-location", "api"}),
        "workspace": (
            {"dagster": {"extraLocations": [{"host": "more", "port": 4000}]}},
            {"webserver", "daemon", "api"},
        ),
    }
    for change, replaced in changes.values():
        assert _differing(base, overlaid(base, change)) == replaced
    one, other = ({"playbooks": {"files": {"a.yaml": text}}} for text in ("a", "b"))
    replaced = {"code-location", "api", "worker-default"}
    assert _differing(overlaid(base, one), overlaid(base, other)) == replaced


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    templates = [
        {
            name: json.dumps(found["spec"]["template"])
            for name, found in of_kind(manifests(values), "Deployment").items()
        }
        for values in (one, other)
    ]
    return {
        name.removeprefix("trial-noetl-dagster-") for name, text in templates[0].items() if templates[1][name] != text
    }


def test_a_node_s_variables_are_not_taken_for_settings(objects: list[Manifest]) -> None:
    """A Service named noetl-service would set NOETL_SERVICE_PORT=tcp://..."""
    assert all(pods.spec["enableServiceLinks"] is False for pods in all_pods(objects))


def test_files_of_nats_and_spark_are_yaml_where_they_are(objects: list[Manifest]) -> None:
    for one in of_kind(objects, "ConfigMap").values():
        for name, text in one["data"].items():
            if name.endswith(".yaml") and not name.startswith("squares"):
                assert isinstance(yaml.safe_load(text), dict)


def test_the_adapter_s_rule_serves_what_autoscalers_ask() -> None:
    """Once for each pool, however many processes report it."""
    page = (PROJECT / "docs" / "how-to" / "workers.md").read_text()
    block = page.split('```yaml title="prometheus-adapter-values.yaml"\n')[1].split("```")[0]
    [rule] = yaml.safe_load(block)["rules"]["external"]
    scaled = next(iter(of_kind(manifests(SCENARIOS["eks"]), "HorizontalPodAutoscaler").values()))
    [metric] = [one["external"]["metric"] for one in scaled["spec"]["metrics"]]
    assert rule["name"]["as"] == metric["name"]
    grouped = re.findall(r"(\w+) by \((.*?)\) \((\w+)", rule["metricsQuery"])
    assert [(how, name) for how, _, name in grouped] == [("max", "noetl_queue_depth"), ("max", "noetl_queue_active")]
    for _, labels, _ in grouped:
        assert set(labels.split(", ")) == metric["selector"]["matchLabels"].keys()
