"""Values: every one described, wrong ones refused with their names, pages and settings up to date."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from noetl_dagster.settings import Settings
from tests.conftest import PROJECT
from tests.helm.chart import (
    MINIMAL,
    PATH,
    SCENARIOS,
    chart,
    component,
    dagster_yaml,
    manifests,
    of_kind,
    overlaid,
    texts,
)

PAGES = runpy.run_path(str(PROJECT / "scripts" / "chart_page.py"))
VALUES: dict[str, Any] = yaml.safe_load((PATH / "values.yaml").read_text())


def schema() -> dict[str, Any]:
    found = chart().schema
    assert found is not None
    return found


def described(node: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property of a schema by its path, those of definitions once."""
    for name, about in node.get("properties", {}).items():
        yield f"{above}{name}", about
        yield from described(about, f"{above}{name}.")


def test_values_and_schema_have_the_same_keys() -> None:
    definitions = schema()["$defs"]

    def stands(values: dict[str, Any], about: dict[str, Any], path: str) -> None:
        """Every value is in the schema; what a definition leaves open may be left out of values."""
        known = definitions.get(about.get("$ref", "").rpartition("/")[2], about).get("properties")
        for name, value in values.items() if known is not None else ():
            assert name in known, f"{path}{name} is not in values.schema.json"
            if isinstance(value, dict):
                stands(value, known[name], f"{path}{name}.")

    def given(values: dict[str, Any], about: dict[str, Any], path: str) -> None:
        """Every property is in values.yaml, those below an empty mapping are not."""
        for name, below in about.get("properties", {}).items():
            if path or name != "global":
                assert name in values, f"{path}{name} is not in values.yaml"
                if values[name]:
                    given(values[name], below, f"{path}{name}.")

    stands(VALUES, schema(), "")
    given(VALUES, schema(), "")


def test_every_value_is_described() -> None:
    nodes = [*described(schema()), *(pair for one in schema()["$defs"].values() for pair in described(one))]
    assert len(nodes) > 150
    for path, about in nodes:
        assert about.get("description") or "$ref" in about, path


def test_no_object_takes_what_it_does_not_know() -> None:
    for path, about in [("", schema()), *described(schema()), *schema()["$defs"].items()]:
        if "properties" in about:
            assert "additionalProperties" in about, path


WRONG: dict[str, dict[str, Any]] = {
    "replica": {"api": {"replica": 3}},
    "/api/replicas": {"api": {"replicas": "three"}},
    "/image/pullPolicy": {"image": {"pullPolicy": "Sometimes"}},
    "/image/digest": {"image": {"digest": "latest"}},
    "/logLevel": {"logLevel": "LOUD"},
    "RETENTION_DAYS": {"settings": {"RETENTION_DAYS": 3}},
    "/settings/NOETL_RETENTION_DAYS": {"settings": {"NOETL_RETENTION_DAYS": [30]}},
    "/runs/resources/limits/cpu": {"runs": {"resources": {"limits": {"cpu": "two"}}}},
    "/ingress/tls/0": {"ingress": {"tls": [{"secret": "x"}]}},
    "/storage/s3/bucket": {"storage": {"s3": {"bucket": "s3://results"}}},
    "postgre": {"workers": {"defaults": {"toolPools": {"postgre": 4}}}},
    "/storage/tier": {"storage": {"tier": "floppy"}},
    "/storage/minio/endpoint": {"storage": {"minio": {"endpoint": "minio:9000"}}},
    "/storage/pvc/size": {"storage": {"pvc": {"size": "much"}}},
    "/tracing/sampling": {"tracing": {"sampling": 2}},
    "pasword": {"secrets": {"pasword": "secret"}},
    "/secrets/dbUrl": {"secrets": {"dbUrl": "postgresql://me:secret@here/db"}},
    "Big Ones": {"workers": {"pools": {"Big Ones": {}}}},
    "slot": {"workers": {"pools": {"default": {"slot": 3}}}},
    "/workers/defaults/autoscaling/kind": {"workers": {"defaults": {"autoscaling": {"kind": "magic"}}}},
    "/runs/resources/limits/memory": {"runs": {"resources": {"limits": {"memory": "4 GB"}}}},
    "/spark/mode": {"spark": {"mode": "yarn"}},
    "/spark/remote": {"spark": {"remote": "spark:15002"}},
    "executor.memory": {"spark": {"config": {"executor.memory": "1g"}}},
    "/networkPolicy/tools/to/0/ipBlock/cidr": {
        "networkPolicy": {"tools": {"to": [{"ipBlock": {"cidr": "everywhere"}}]}}
    },
    "/dagster/webserver/pathPrefix": {"dagster": {"webserver": {"pathPrefix": "dagster/"}}},
    "runner": {"serviceAccounts": {"roles": {"runner": {"name": "x"}}}},
    "tolerance": {"pod": {"tolerance": []}},
    "/fullnameOverride": {"fullnameOverride": "a.b"},
    "/trial/password": {"trial": {"password": 7}},
    "maxResumeRunAttempts": {"dagster": {"runMonitoring": {"maxResumeRunAttempts": 1}}},
    "/workers/defaults/autoscaling/minReplicas": {
        "workers": {"defaults": {"autoscaling": {"kind": "hpa", "minReplicas": 0}}}
    },
}
"""What the message names -> values."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_its_name(name: str) -> None:
    values = overlaid(MINIMAL, WRONG[name])
    with pytest.raises(HelmError, match=re.escape(name)):
        chart().validate_schema(values)
    with pytest.raises(HelmError, match=re.escape(name)):
        chart().render(values, name="trial", namespace="data")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"api": None}, "missing property 'api'"),
        ({"secrets": {"dbUrl": None}}, "at '/secrets': missing property 'dbUrl'"),
        ({"secrets": {"dbUrl": {"key": None}}}, "at '/secrets/dbUrl': missing property 'key'"),
        ({"api": {"processes": None}}, "at '/api': missing property 'processes'"),
        ({"workers": {"defaults": {"slots": None}}}, "at '/workers/defaults': missing property 'slots'"),
    ],
)
def test_null_is_refused_where_a_value_is_needed(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError, match=said):
        manifests(overlaid(MINIMAL, {"monitoring": {"serviceMonitor": {"token": {"name": "noetl"}}}}, values))


def test_null_replicas_are_left_to_the_person_who_scales() -> None:
    values = {
        "api": {"replicas": None},
        "workers": {"defaults": {"replicas": None}, "pools": {"more": {"replicas": 3}}},
    }
    found = of_kind(manifests(overlaid(MINIMAL, values)), "Deployment")
    replicas = {name.removeprefix("trial-noetl-dagster-"): one["spec"].get("replicas") for name, one in found.items()}
    assert (replicas["api"], replicas["worker-default"], replicas["worker-more"]) == (None, None, 3)
    assert replicas["ingest"] == 2


def test_null_takes_away_what_may_be_missing() -> None:
    values = {"api": {"resources": {"limits": None}, "disruptionBudget": None}}
    objects = manifests(overlaid(MINIMAL, values))
    assert component(objects, "api").container["resources"].keys() == {"requests"}
    assert "trial-noetl-dagster-api" not in of_kind(objects, "PodDisruptionBudget")


NEEDED: dict[str, dict[str, Any]] = {
    "secrets.dbUrl.name or secrets.name: name the Secret that holds NOETL_DB_URL": {
        "storage": {"tier": "s3", "s3": {"bucket": "results"}}
    },
    "storage.minio.endpoint: the tier minio needs": {"secrets": {"name": "noetl"}},
    "storage.s3.bucket": overlaid(MINIMAL, {"storage": {"s3": {"bucket": ""}}}),
    "storage.gcs.bucket": overlaid(MINIMAL, {"storage": {"tier": "gcs"}}),
    "storage.pvc.enabled": overlaid(MINIMAL, {"storage": {"tier": "pvc"}}),
    "spark.remote": overlaid(MINIMAL, {"spark": {"mode": "connect"}}),
    "spark.master": overlaid(MINIMAL, {"spark": {"mode": "standalone"}}),
    "workers.serverUrl": overlaid(MINIMAL, {"api": {"enabled": False}}),
    "dagster.extraLocations": overlaid(MINIMAL, {"dagster": {"enabled": False}}),
    "ingress.webserver.host or ingress.api.host": overlaid(MINIMAL, {"ingress": {"enabled": True}}),
    "serviceAccounts.roles": overlaid(MINIMAL, {"serviceAccounts": {"create": False}}),
    "dagster.extraInstance.concurrency": overlaid(
        MINIMAL, {"dagster": {"extraInstance": {"concurrency": {"pools": {"granularity": "op"}}}}}
    ),
    "ingress.api.host: api.enabled is false": overlaid(
        SCENARIOS["API elsewhere"], {"ingress": {"enabled": True, "api": {"host": "api.example.com"}}}
    ),
    "ingress.webserver.host: dagster.enabled is false": overlaid(
        SCENARIOS["official"], {"ingress": {"enabled": True, "webserver": {"host": "a.example.com"}}}
    ),
    "ingress.tls: other.example.com is neither": overlaid(
        SCENARIOS["gke"], {"ingress": {"tls": [{"hosts": ["other.example.com"]}]}}
    ),
    "commonLabels.app.kubernetes.io/version": overlaid(MINIMAL, {"commonLabels": {"app.kubernetes.io/version": "2"}}),
    "pod.labels.app.kubernetes.io/component of ": overlaid(
        MINIMAL, {"runs": {"pod": {"labels": {"app.kubernetes.io/component": "mine"}}}}
    ),
    "dagster.computeLogs.custom: the manager custom needs module and class": overlaid(
        MINIMAL, {"dagster": {"computeLogs": {"manager": "custom"}}}
    ),
    "settings.NOETL_DB_URL: a ConfigMap would show this secret": overlaid(
        MINIMAL, {"settings": {"NOETL_DB_URL": "postgresql://me:secret@here/db"}}
    ),
    "settings.NOETL_MINIO_SESSION_TOKEN: a ConfigMap would show this secret": overlaid(
        MINIMAL, {"settings": {"NOETL_MINIO_SESSION_TOKEN": "secret"}}
    ),
    "settings.NOETL_LOG_LEVEL: another value": overlaid(MINIMAL, {"settings": {"NOETL_LOG_LEVEL": "DEBUG"}}),
    "settings.NOETL_WORKER_SLOTS: another value": overlaid(MINIMAL, {"settings": {"NOETL_WORKER_SLOTS": 4}}),
    "resources of run: requests.cpu 3 is above limits.cpu 2": overlaid(
        MINIMAL, {"runs": {"resources": {"requests": {"cpu": 3}}}}
    ),
    "resources of api: requests.memory 1500Mi is above limits.memory 1Gi": overlaid(
        MINIMAL, {"api": {"resources": {"requests": {"memory": "1500Mi"}}}}
    ),
    "workers.pools.default.autoscaling: minReplicas 9 is above maxReplicas 3": overlaid(
        MINIMAL,
        {"workers": {"defaults": {"autoscaling": {"kind": "keda", "minReplicas": 9, "maxReplicas": 3}}}},
    ),
    "workers.pools.large.autoscaling.depthPerWorker: 16 is above its slots, 4": overlaid(
        MINIMAL,
        {"workers": {"pools": {"large": {"slots": 4, "autoscaling": {"kind": "hpa", "depthPerWorker": 16}}}}},
    ),
    "storage.pvc.mountPath: something else is at /tmp/": overlaid(
        MINIMAL, {"storage": {"pvc": {"enabled": True, "mountPath": "/tmp/"}}}
    ),
    "storage.pvc.mountPath: something else is at /opt/noetl ": overlaid(
        MINIMAL, {"storage": {"pvc": {"enabled": True, "mountPath": "/opt/noetl"}}}
    ),
    "have a volume tmp already": overlaid(MINIMAL, {"pod": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}}),
    "pods of executor have a volume work already": overlaid(
        MINIMAL,
        {
            "spark": {"mode": "kubernetes"},
            "pod": {"extraVolumes": [{"name": "work", "emptyDir": {}}]},
        },
    ),
    "pod.extraVolumeMounts: own is no volume": overlaid(
        MINIMAL, {"pod": {"extraVolumeMounts": [{"name": "own", "mountPath": "/own"}]}}
    ),
    "dagster.computeLogs.manager: s3 is for S3": {
        "secrets": {"name": "noetl"},
        "storage": {"tier": "gcs", "gcs": {"bucket": "results"}},
        "dagster": {"computeLogs": {"manager": "s3"}},
    },
    "pod.probes of run: only Deployments": overlaid(MINIMAL, {"runs": {"pod": {"probes": {"startup": None}}}}),
    "ingress.parentRefs: name the Gateway": overlaid(
        MINIMAL, {"ingress": {"enabled": True, "kind": "HTTPRoute", "webserver": {"host": "a.example.com"}}}
    ),
    "ingress.tls: Route has no certificates; the router has them": overlaid(
        MINIMAL,
        {"ingress": {"enabled": True, "kind": "Route", "webserver": {"host": "a.io"}, "tls": [{"hosts": ["a.io"]}]}},
    ),
    "monitoring.serviceMonitor.token.name": overlaid(MINIMAL, {"monitoring": {"serviceMonitor": {"enabled": True}}}),
}
"""What a message says that is about values which need each other."""


@pytest.mark.parametrize("message", NEEDED)
def test_what_is_missing_is_named(message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        chart().render(NEEDED[message], name="trial", namespace="data")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_right_values_are_taken(scenario: str) -> None:
    chart().validate_schema(SCENARIOS[scenario])


def test_the_page_is_made_from_values_and_schema() -> None:
    assert (PROJECT / "docs" / "reference" / "chart-values.md").read_text() == PAGES["chart_page"](), "run make docs"


def test_the_schema_is_in_its_layout_and_requires_what_has_a_default() -> None:
    assert (PATH / "values.schema.json").read_text() == PAGES["chart_schema"](), "run make docs"


def test_every_secret_setting_is_refused_among_plain_ones() -> None:
    """Those of the value ``secrets``, and those that only a person's own Secret gives."""
    secrets = {f"NOETL_{name.upper()}" for name, field in Settings.model_fields.items() if "SecretStr" in str(field)}
    for name in sorted(secrets | {"NOETL_DB_URL", "NOETL_DAGSTER_DB_URL", "NOETL_NATS_URL"}):
        with pytest.raises(HelmError, match=f"settings.{name}: a ConfigMap would show"):
            chart().render(overlaid(MINIMAL, {"settings": {name: "x"}}), name="trial", namespace="data")


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert chart().metadata["appVersion"] == project["version"] == chart().version
    assert chart().metadata["kubeVersion"] == ">=1.29.0-0"


def test_a_digest_takes_the_place_of_the_tag() -> None:
    images = {
        one["spec"]["template"]["spec"]["containers"][0]["image"]
        for one in manifests(SCENARIOS["everything"])
        if one["kind"] == "Deployment"
    }
    assert images == {f"ghcr.io/noetl/noetl-dagster@sha256:{'0' * 64}"}


def test_large_numbers_stay_whole() -> None:
    """Helm reads numbers as floating point, and prints a million as 1e+06."""
    text = "\n".join(chart().render(SCENARIOS["everything"], name="trial", namespace="data").values())
    assert not re.search(r"\de\+\d", text)
    assert "max_concurrent_runs: 1000000" in text
    assert 'NOETL_HTTP_BODY_BYTES: "33554432"' in text
    assert 'NOETL_STORES_SHARED: "false"' in text


ODD = ("1e3", "0123", "null")
"""Texts that YAML takes for something else where nobody quotes them."""


@pytest.mark.parametrize("odd", ODD)
def test_texts_stay_texts(odd: str) -> None:
    objects = manifests(
        overlaid(
            MINIMAL,
            {
                "fullnameOverride": "odd",
                "storage": {"s3": {"bucket": odd}},
                "workers": {"pools": {odd: {}}, "defaults": {"autoscaling": {"kind": "keda"}}},
                "secrets": {"name": odd, "dbUrl": {"key": odd}},
                "serviceAccounts": {"roles": {"run": {"name": odd}, "worker": {"name": odd}}},
                "nameOverride": odd,
                "dagster": {"computeLogs": {"prefix": odd}},
            },
        ),
        release=odd,
    )
    settings = of_kind(objects, "ConfigMap")["odd-settings"]["data"]
    assert settings["NOETL_S3_BUCKET"] == odd
    assert all(isinstance(value, str) for value in settings.values())
    worker = component(objects, f"worker-{odd}")
    assert worker.variables(objects)["NOETL_WORKER_POOL"] == odd
    assert worker.spec["serviceAccountName"] == odd
    [secret] = [one["valueFrom"] for one in worker.container["env"] if one["name"] == "NOETL_DB_URL"]
    assert secret == {"secretKeyRef": {"name": odd, "key": odd}}
    instance = dagster_yaml(objects)
    assert instance["compute_logs"]["config"]["bucket"] == odd
    assert instance["compute_logs"]["config"]["prefix"] == odd
    assert instance["run_launcher"]["config"]["service_account_name"] == odd
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in objects} == {odd}
    scaled = of_kind(objects, "ScaledObject")[f"odd-worker-{odd}"]
    assert f'pool="{odd}"' in scaled["spec"]["triggers"][0]["metadata"]["query"]


def test_templates_read_yaml_by_what_refuses_errors() -> None:
    unchecked = {
        (path.name, line.strip())
        for path in (PATH / "templates").rglob("*")
        if path.is_file() and path.name != "_read.tpl"  # which checks
        for line in path.read_text().splitlines()
        if "fromYaml" in line
    }
    assert not unchecked


@pytest.mark.parametrize("release", ["1noetl"])
def test_names_that_services_cannot_have_are_refused(release: str) -> None:
    with pytest.raises(HelmError, match=f'fullnameOverride: .*"{release}-noetl-dagster" would begin all names'):
        chart().render(MINIMAL, name=release, namespace="data")
    chart().render({**MINIMAL, "fullnameOverride": "noetl"}, name=release, namespace="data")


@pytest.mark.parametrize("size", ["1.5T", "65536Ki"])
def test_memory_has_any_unit_of_kubernetes(size: str) -> None:
    manifests(overlaid(MINIMAL, {"runs": {"resources": {"requests": {"memory": "1Mi"}, "limits": {"memory": size}}}}))


def test_a_volume_that_many_write_to_and_has_no_class_is_warned_of() -> None:
    claim = {"storage": {"pvc": {"enabled": True}}}
    notes = "noetl-dagster/templates/NOTES.txt"
    assert "WARNING: storage.pvc.storageClass" in texts(overlaid(MINIMAL, claim))[notes]
    named = overlaid(MINIMAL, claim, {"storage": {"pvc": {"storageClass": "nfs"}}})
    assert "WARNING" not in texts(named)[notes]
