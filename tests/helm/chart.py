"""The chart as Helm renders it: values files and toggles, manifests, and the pods that they make."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import yaml
from helm_python import Chart

from tests.conftest import PROJECT

PATH = PROJECT / "helm" / "noetl-dagster"
RELEASE, NAMESPACE = "trial", "data"
Manifest = dict[str, Any]

MINIMAL: dict[str, Any] = {
    "secrets": {"name": "noetl"},
    "storage": {"tier": "s3", "s3": {"bucket": "results"}},
}
"""What production has to say."""


def values_file(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PATH / f"values-{name}.yaml").read_text())
    return loaded


def overlaid(base: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Values laid over values, as ``-f a -f b`` does."""
    merged = copy.deepcopy(dict(base))
    for other in others:
        for key, value in other.items():
            below = merged.get(key)
            both = isinstance(below, dict) and isinstance(value, Mapping)
            merged[key] = overlaid(below, value) if both else copy.deepcopy(value)
    return merged


KIND = values_file("kind")
SCENARIOS: dict[str, dict[str, Any]] = {
    "kind": KIND,
    "gke": values_file("gke"),
    "eks": values_file("eks"),
    "official": overlaid(
        MINIMAL,
        {
            "fullnameOverride": "noetl",
            "dagster": {"enabled": False, "extraLocations": [{"host": "noetl-playbooks", "port": 4000}]},
        },
    ),
    "minimal": MINIMAL,
    "everything": overlaid(
        values_file("gke"),
        {
            "commonLabels": {"team": "data"},
            "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "registry"}]},
            "settings": {
                "NOETL_HTTP_BODY_BYTES": 33554432,
                "NOETL_STORES_SHARED": False,
                "NOETL_NATS_NAMESPACE": "own",
            },
            "playbooks": {"configMap": "playbooks"},
            "tracing": {"endpoint": "http://collector.monitoring:4318", "sampling": 0.1},
            "pod": {
                "labels": {"cost": "data"},
                "nodeSelector": {"pool": "data"},
                "tolerations": [{"key": "data", "operator": "Exists"}],
                "affinity": {"nodeAffinity": {}},
                "priorityClassName": "high",
                "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                "extraEnvFrom": [{"configMapRef": {"name": "proxies"}}],
                "extraVolumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
                "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/own"}],
            },
            "dagster": {
                "webserver": {"pathPrefix": "/dagster"},
                "extraLocations": [{"host": "others.team", "port": 4001, "location_name": "others"}],
                "retention": {"sensor": {"purge_after_days": 7}},
                "extraInstance": {"run_retries": {"enabled": True, "max_retries": 1}},
            },
            "runs": {
                "maxConcurrent": 1_000_000,
                "tagLimits": [{"key": "team", "value": {"applyLimitPerUniqueValue": True}, "limit": 3}],
                "pools": {"default_limit": 4, "granularity": "op"},
                "allowedFields": {"container_config": {"resources": True}},
            },
            "api": {"processes": 4, "tls": {"secretName": "api-tls"}},
            "workers": {
                "containers": True,
                "drainSeconds": 1_000_000,
                "defaults": {"toolPools": {"postgres": 4}},
            },
            "serviceAccounts": {"roles": {"run": {"name": "runs"}, "api": {"annotations": {"own": "api"}}}},
            "rbac": {"readSecrets": ["playbook-secrets"]},
            "networkPolicy": {"cilium": True},
            "ingress": {"api": {"host": "api.example.com"}},
            "monitoring": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}},
        },
    ),
    "bare": overlaid(
        MINIMAL,
        {
            "networkPolicy": {"enabled": False},
            "serviceAccounts": {"create": False},
            "rbac": {"create": False},
            "provision": {"enabled": False},
            "ingest": {"enabled": False},
            "api": {"enabled": False},
            "dagster": {"enabled": False},
            "workers": {"pools": {"default": None}},
            "pod": {"topologySpread": []},
        },
    ),
    "dagster elsewhere": overlaid(
        MINIMAL,
        {
            "dagster": {"enabled": False, "extraLocations": [{"host": "noetl", "port": 4000}]},
            "networkPolicy": {"servicesFrom": [{"podSelector": {}}]},
            "postgresql": {"enabled": True},
        },
    ),
    "trial with Spark": overlaid(KIND, {"spark": {"mode": "kubernetes"}, "upkeep": {"enabled": True}}),
    "gateway": overlaid(
        MINIMAL,
        {
            "ingress": {
                "enabled": True,
                "kind": "HTTPRoute",
                "parentRefs": [{"name": "gateway", "namespace": "edge"}],
                "webserver": {"host": "dagster.example.com"},
                "api": {"host": "api.example.com"},
            },
            "dagster": {
                "codeLocations": {
                    "reports": {
                        "image": {"repository": "registry.example.org/reports"},
                        "module": "reports.definitions",
                    }
                }
            },
        },
    ),
    "OpenShift": overlaid(
        MINIMAL,
        {
            "ingress": {
                "enabled": True,
                "kind": "Route",
                "webserver": {"host": "dagster.example.com"},
                "api": {"host": "api.example.com"},
            },
            "api": {"tls": {"secretName": "api-tls"}},
        },
    ),
    "only NATS": overlaid(MINIMAL, {"nats": {"enabled": True, "storageClass": "fast"}}),
    "Spark Connect": overlaid(MINIMAL, {"spark": {"mode": "connect", "remote": "sc://spark:15002"}}),
    "Spark standalone": overlaid(
        MINIMAL,
        {
            "spark": {
                "mode": "standalone",
                "master": "spark://spark:7077",
                "driverMemory": "3g",
                "config": {"spark.x": "1"},
            }
        },
    ),
    "own S3": overlaid(
        MINIMAL,
        {
            "storage": {
                "tier": "minio",
                "minio": {"endpoint": "https://s3.example.com"},
                "pvc": {"enabled": True},
            },
            "dagster": {"computeLogs": {"manager": "s3"}},
            "playbooks": {"volume": {"persistentVolumeClaim": {"claimName": "playbooks"}}},
        },
    ),
    "shared claim": overlaid(
        MINIMAL,
        {
            "storage": {"tier": "pvc", "pvc": {"enabled": True, "existingClaim": "shared"}},
            "secrets": {"credentialKey": {"name": "other", "key": "fernet"}},
            "dagster": {"computeLogs": {"manager": "local"}},
        },
    ),
    "API elsewhere": overlaid(
        MINIMAL, {"api": {"enabled": False}, "workers": {"serverUrl": "https://api.example.com"}}
    ),
    "paused": overlaid(MINIMAL, {"workers": {"pools": {"default": {"replicas": 0}}}, "fullnameOverride": "noetl"}),
}
"""Every values file, and each switch both ways in one of the others."""


@cache
def chart() -> Chart:
    return Chart.load(PATH)


@cache
def _rendered(values: bytes, release: str, namespace: str) -> dict[str, str]:
    return chart().render(orjson.loads(values), name=release, namespace=namespace)


def texts(values: Mapping[str, Any], release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """Template -> what it renders."""
    return _rendered(orjson.dumps(values, option=orjson.OPT_SORT_KEYS), release, namespace)


def manifests(values: Mapping[str, Any], release: str = RELEASE) -> list[Manifest]:
    """Every object of a release, hooks and the test included; the caller's own."""
    parsed: list[Manifest] = orjson.loads(_parsed(orjson.dumps(values, option=orjson.OPT_SORT_KEYS), release))
    return parsed


@cache
def _parsed(values: bytes, release: str) -> bytes:
    found = []
    for name, text in _rendered(values, release, NAMESPACE).items():
        if name.endswith(".yaml"):
            found += [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]
    return orjson.dumps(found)


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Objects of a kind by their names."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@dataclass(frozen=True)
class Pods:
    """The pods of an object."""

    kind: str
    name: str
    labels: Mapping[str, str]
    spec: Manifest

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def is_ours(self) -> bool:
        """Whether it runs the platform's image."""
        return "noetl-dagster" in self.container["image"]

    def variables(self, objects: list[Manifest]) -> dict[str, str]:
        """Its variables that have a plain value, those of ConfigMaps of the release included."""
        maps = of_kind(objects, "ConfigMap")
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            found |= maps.get(source["configMapRef"]["name"], {}).get("data", {})
        return found | {one["name"]: one["value"] for one in self.container["env"] if "value" in one}


def pods_of(objects: list[Manifest]) -> Iterator[Pods]:
    """The pods that a release's objects make; not those that Dagster launches."""
    for one in objects:
        name = one["metadata"]["name"]
        if one["kind"] == "Pod":
            yield Pods("Pod", name, one["metadata"]["labels"], one["spec"])
        elif one["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob"):
            spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
            template = spec["template"]
            yield Pods(one["kind"], name, template["metadata"]["labels"], template["spec"])


def component(objects: list[Manifest], name: str) -> Pods:
    (found,) = (pods for pods in pods_of(objects) if pods.component == name)
    return found


def dagster_yaml(objects: list[Manifest]) -> Manifest:
    """The instance that processes and runs have."""
    (found,) = (one for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-instance"))
    loaded: Manifest = orjson.loads(_as_json(found["data"]["dagster.yaml"]))
    return loaded


@cache
def _as_json(text: str) -> bytes:
    return orjson.dumps(yaml.load(text, Loader=yaml.CSafeLoader))
