"""Every value of the chart changes what it renders: none is there for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from tests.helm.chart import MINIMAL, chart, overlaid
from tests.helm.test_values import VALUES, schema

Path = tuple[str, ...]

UNREAD = {("global",), ("trial", "password")}
"""Helm's own name for what charts share; and what the trial's Secret is derived from, which is not looked at."""

BASE = overlaid(
    MINIMAL,
    {
        "monitoring": {
            "serviceMonitor": {"enabled": True, "token": {"name": "noetl"}},
            "rules": {"enabled": True},
        },
        "ingress": {
            "enabled": True,
            "webserver": {"host": "dagster.example.com"},
            "api": {"host": "api.example.com"},
        },
        "storage": {"minio": {"endpoint": "https://s3.example.com"}, "pvc": {"enabled": True}},
        "tracing": {"endpoint": "http://collector:4318"},
        "dagster": {"extraLocations": [{"host": "others", "port": 4000}]},
        "spark": {"mode": "kubernetes"},
        "upkeep": {"enabled": True},
        "runs": {"containers": True},
        "api": {"tls": {"secretName": "api-tls"}},
        "pod": {"extraVolumes": [{"name": "own", "emptyDir": {}}]},
    },
)
"""Most switches on, so that what hangs on them is seen."""

TOGETHER: dict[str, dict[str, Any]] = {
    "storage.minio": {"storage": {"tier": "minio"}},
    "dagster.computeLogs.custom": {
        "dagster": {"computeLogs": {"manager": "custom", "custom": {"module": "a", "class": "A"}}}
    },
    "spark.remote": {"spark": {"mode": "connect", "remote": "sc://spark:15002"}},
    "api.enabled": {
        "workers": {"serverUrl": "https://api.example.com"},
        "ingress": {"api": {"host": ""}},
    },
    "dagster.enabled": {"ingress": {"webserver": {"host": ""}}},
    "serviceAccounts.create": {"rbac": {"create": False}},
    "postgresql.": {"postgresql": {"enabled": True}},
    "nats.": {"nats": {"enabled": True}},
    "minio.": {"minio": {"enabled": True}, "storage": {"minio": {"endpoint": ""}}},
    "serviceAccounts.roles.trial": {"nats": {"enabled": True}},
    "ingress.kind": {"ingress": {"parentRefs": [{"name": "gateway"}]}},
    "ingress.parentRefs": {"ingress": {"kind": "HTTPRoute", "parentRefs": [{"name": "gateway"}]}},
    "networkPolicy.kubernetes": {"networkPolicy": {"cilium": False}},
    "networkPolicy.servicesFrom": {"nats": {"enabled": True}},
    "workers.defaults.autoscaling": {"workers": {"defaults": {"autoscaling": {"kind": "keda"}}}},
}
"""What a value needs beside it to be seen, by the beginning of its path; the longest counts."""

OTHER: dict[str, Any] = {
    "storage.tier": "pvc",
    "dagster.computeLogs.custom": {"module": "b", "class": "B"},
    "settings": {"NOETL_RETENTION_DAYS": 7},
    "dagster.retention": {"sensor": {"purge_after_days": 7}},
    "dagster.extraInstance": {"run_retries": {"enabled": True}},
    "spark.mode": "local",
    "spark.master": "k8s://https://other:6443",
    "spark.remote": "sc://other:15002",
    "spark.config": {"spark.own": "1"},
    "playbooks.files": {"own.yaml": "own"},
    "image.pullSecrets": [{"name": "own"}],
    "dagster.extraLocations": [{"host": "own", "port": 4001}],
    "runs.tagLimits": [{"key": "own", "limit": 1}],
    "workers.pools": {"own": {}},
    "workers.defaults.toolPools": {"postgres": 4},
    "ingress.tls": [{"secretName": "own"}],
    "dagster.codeLocations": {"own": {}},
    "dagster.computeLogs.manager": "local",
}
"""Values for leaves that have to be of a certain kind."""

BY_NAME: dict[str, Any] = {
    "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    "ports": [1234],
    "extraEnv": [{"name": "OWN", "value": "1"}],
    "extraVolumes": [{"name": "own", "emptyDir": {"medium": "Memory"}}],
    "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
    "topologySpread": [{"topologyKey": "own", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}],
    "digest": f"sha256:{'1' * 64}",
    "runAsUser": 1234,
    "runAsGroup": 1234,
    "fsGroup": 1234,
    "fsGroupChangePolicy": "Always",
    "supplementalGroups": [1234],
    "initContainers": [{"name": "own", "image": "own"}],
    "extraContainers": [{"name": "own", "image": "own"}],
    "ipFamilies": ["IPv6"],
    "loadBalancerSourceRanges": ["10.1.0.0/16"],
    "startup": {"periodSeconds": 7},
    "readiness": {"periodSeconds": 7},
    "liveness": {"periodSeconds": 7},
    "strategy": {"type": "OnDelete"},
    "ephemeralStorage": "7Gi",
    "monitoringFrom": [{"podSelector": {}}],
    "ingressFrom": [{"podSelector": {}}],
    "servicesFrom": [{"podSelector": {}}],
    "dnsPorts": [54],
    "volume": {"nfs": {"server": "nfs", "path": "/"}},
}
"""Values for leaves of a name, wherever they stand."""

TEXTS = ("own", "7", "https://own.example.com", "/own", "7Gi", "7g", "7s")


def leaves(about: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every value with its schema, those of definitions wherever they are referred to."""
    known = about.get("propertyNames", {}).get("enum", about["properties"])
    for name, below in about["properties"].items():
        if name not in known:
            continue
        full = resolved(below)
        if "properties" in full and ".".join((*path, name)) not in OTHER:
            yield from leaves(full, (*path, name))
        else:
            yield (*path, name), full


def resolved(about: Mapping[str, Any]) -> dict[str, Any]:
    reference = about.get("$ref", "").rpartition("/")[2]
    return {**(schema()["$defs"][reference] if reference else {}), **about}


def valued(values: Mapping[str, Any], path: Path) -> Any:
    """What values say at a path; None: nothing."""
    for name in path:
        values = values.get(name) or {} if isinstance(values, Mapping) else {}
    return values


def nested(path: Path, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def another(path: Path, about: Mapping[str, Any], now: Any) -> Any:
    """Another value that the schema takes."""
    dotted, kind = ".".join(path), about.get("type", ())
    if dotted in OTHER or path[-1] in BY_NAME:
        return OTHER.get(dotted, BY_NAME.get(path[-1]))
    if path[-2:-1] == ("requests",):
        return {"cpu": "10m", "memory": "7Mi"}.get(path[-1], {"own": "1"})  # below every limit
    if "enum" in about:
        return next(one for one in about["enum"] if one != now)
    if kind == "boolean":
        return not now
    if isinstance(now, int | float) or kind in ("integer", "number"):
        higher = (now or 0) + 1
        return higher if higher <= about.get("maximum", higher) else about["minimum"]
    if "string" in kind:
        return next(one for one in TEXTS if one != now and re.search(about.get("pattern", ""), one))
    return [{"own": {}} if about["items"]["type"] == "object" else "own"] if kind == "array" else {"own": "1"}


def rendered(values: Mapping[str, Any]) -> str:
    """All of it but sums of what is read, and passwords that are made anew each time."""
    found = chart().render(dict(values), name="trial", namespace="data")
    text = "\n".join(one for name, one in sorted(found.items()) if not name.endswith("trial-secret.yaml"))
    return re.sub(r"checksum/\w+: \w+", "", text)


@cache
def before(beginning: str) -> str:
    """What the base renders with what stands beside a value."""
    return rendered(overlaid(BASE, TOGETHER.get(beginning, {})))


def assert_read(dotted: str) -> None:
    path, about = LEAVES[dotted]
    beginning = max((one for one in TOGETHER if dotted.startswith(one)), key=len, default="")
    base = overlaid(BASE, TOGETHER.get(beginning, {}))
    change = nested(path, another(path, about, valued(overlaid(VALUES, base), path)))
    if path[-1] == "minAvailable":
        change = overlaid(change, nested((*path[:-1], "maxUnavailable"), None))  # one of the two
    assert rendered(overlaid(base, change)) != before(beginning), f"{dotted} changes nothing"


OF_WORKLOADS = {"extraContainers", "probes", "strategy", "workloadAnnotations"}
OF_JOBS = {"runs", "containers", "spark", "provision", "upkeep", "test"}

LEAVES = {
    ".".join(path): (path, about)
    for path, about in leaves(schema())
    if path not in UNREAD and not (path[0] in OF_JOBS and OF_WORKLOADS & set(path))  # which the chart refuses
}


SAMPLE = sorted(LEAVES)[::100]
"""Each value costs a rendering; make test-slow has them all."""


@pytest.mark.parametrize("dotted", SAMPLE)
def test_a_value_changes_what_is_rendered(dotted: str) -> None:
    assert_read(dotted)


@pytest.mark.slow
@pytest.mark.parametrize("dotted", sorted(LEAVES.keys() - set(SAMPLE)))
def test_every_value_changes_what_is_rendered(dotted: str) -> None:
    assert_read(dotted)


def test_a_value_that_nothing_reads_is_found() -> None:
    unread = dict(schema()["properties"]["global"])
    assert unread["type"] == "object"
    for _ in range(2):  # and in no other order either
        assert rendered(overlaid(BASE, {"global": {"own": "1"}})) == before("")


def test_what_stands_beside_values_is_of_values_that_there_are() -> None:
    assert all(any(dotted.startswith(one) for dotted in LEAVES) for one in TOGETHER)
    assert OTHER.keys() <= LEAVES.keys()
    assert {path[-1] for path, _ in LEAVES.values()} >= BY_NAME.keys()
