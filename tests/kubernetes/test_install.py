"""The chart installed, upgraded, rolled back, tested and removed by Helm, in a cluster."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helm_python import HelmError
from kubernetes import client, config

from tests.conftest import PROJECT
from tests.helm.chart import SCENARIOS, overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.kinds import kind_named
from tests.kubernetes.cluster.selectors import labels_match
from tests.kubernetes.cluster.store import Object
from tests.kubernetes.releases import Release
from tests.waiting import until_now

DAYS, PORT = "7", 6432
"""What an upgrade changes: a setting, and where the database is."""


@pytest.fixture
def recorded() -> Iterator[Release]:
    """A cluster in which containers are only recorded: ready at once, and a Job's ended."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="noetl-cluster-"))
        stack.callback(shutil.rmtree, folder)
        cluster = Cluster(folder, images=())
        stack.callback(cluster.close)
        yield Release(cluster)


def images(release: Release) -> dict[str, str]:
    """What pods run, by their components."""
    return {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["spec"]["containers"][0]["image"]
        for pod in release.cluster.pods(namespace=release.namespace)
        if "deletionTimestamp" not in pod["metadata"]
    }


def given(release: Release) -> None:
    """What production has before an install."""
    names = ("NOETL_DB_URL", "NOETL_DAGSTER_DB_URL", "NOETL_NATS_URL", "NOETL_SERVER_TOKEN", "NOETL_SERVICE_TOKENS")
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": dict.fromkeys(names, "given")}
    release.cluster.create(secret | {"metadata": {"name": "noetl", "namespace": release.namespace}})


def contents(objects: dict[tuple[str, str], Object]) -> dict[tuple[str, str], Any]:
    """What objects say, but for those whose names or addresses each revision makes anew."""
    return {
        key: (one.get("spec"), one.get("data"), one.get("rules"))
        for key, one in objects.items()
        if key[0] not in ("Job", "Pod", "ReplicaSet")
    }


def when_provisioning_began(release: Release, since: int) -> dict[str, Object]:
    """The objects of the namespace as the first Job after a version found them, by their kinds, ``Job`` among them.

    Args:
        since: the version of the store.
    """
    changes, _ = release.cluster.store.changes(0, 0)
    found: dict[tuple[str, str, str], Object] = {}
    for change in changes:
        found[change.key] = change.object
        if change.type == "DELETED":
            del found[change.key]
        if change.version > since and change.type == "ADDED" and change.key[0] == "Job":
            break
    return {
        key[0]: one
        for key, one in found.items()
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "provision"
    }


def is_kept(one: Object) -> bool:
    """Data outlives the release, and so do the passwords of its servers."""
    annotations = one["metadata"].get("annotations") or {}
    return one["kind"] == "PersistentVolumeClaim" or annotations.get("helm.sh/resource-policy") == "keep"


@pytest.mark.parametrize(
    "name",
    ["kind", *(pytest.param(one, marks=pytest.mark.slow) for one in ("minimal", "gke", "eks", "official"))],
)
def test_a_release_from_its_install_to_its_end(recorded: Release, name: str) -> None:
    release, values = recorded, SCENARIOS[name]
    given(release)
    before = release.objects()
    is_hook = name != "kind"  # its database comes with the release

    release.install(values)
    if is_hook:
        found = when_provisioning_began(release, 0)
        assert found.keys() == {"ConfigMap", "ServiceAccount", "NetworkPolicy", "Job"}
    installed = release.objects()
    first = {component: release.names(component) for component in images(release)}
    release.test()

    version = release.cluster.store.version
    changed = {
        "settings": {"NOETL_RETENTION_DAYS": int(DAYS)},
        "networkPolicy": {"postgresql": {"ports": [PORT]}},
    }
    release.upgrade(overlaid(values, changed))
    maps = [one for key, one in release.objects().items() if key[0] == "ConfigMap"]
    assert any(one["data"].get("NOETL_RETENTION_DAYS") == DAYS for one in maps)
    if is_hook:
        found = when_provisioning_began(release, version)
        assert found["ConfigMap"]["data"]["NOETL_RETENTION_DAYS"] == DAYS, "its own revision's settings"
        egress = found["NetworkPolicy"]["spec"]["egress"]
        assert [PORT] in [[one["port"] for one in rule["ports"]] for rule in egress], "and its own rights"
    second = {component: release.names(component) for component in images(release)}
    servers = {"postgresql", "nats", "minio"}
    assert not [one for one in second.keys() - servers - {"provision"} if first[one] & second[one]], "rolled"
    assert not [one for one in second.keys() & servers if first[one] != second[one]], "left alone"

    release.rollback()
    again = release.objects()
    assert contents(again) == contents(installed)
    assert [one["status"] for one in release.helm.history(release.name)] == [
        "superseded",
        "superseded",
        "deployed",
    ]

    release.uninstall()

    def left() -> set[tuple[str, str]]:
        return {key for key, one in release.objects().items() if key not in before and not is_kept(one)}

    until_now(lambda: not left(), f"nothing to be left of {left()}")


def test_a_restore_stops_everything_and_starts_it_again(recorded: Release) -> None:
    """The commands of the page, one after the other."""
    page = (PROJECT / "docs" / "how-to" / "backup-and-restore.md").read_text().split("## Restore")[1]
    commands = [line.split() for line in page.replace("   ", "").splitlines() if re.match(r" *(helm|kubectl) ", line)]
    values = overlaid(SCENARIOS["eks"], {"upkeep": {"enabled": True}})
    release, jobs = recorded, kind_named("Job")
    given(release)
    release.install(values)
    for name, label in (("run", "dagster/run-id"), ("step", "app.kubernetes.io/managed-by"), ("others", "own")):
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "busybox"}]}}
        labels = {label: "noetl-dagster"}
        metadata = {"name": name, "namespace": release.namespace, "labels": labels}
        release.cluster.create(
            {"apiVersion": jobs.api_version, "kind": "Job", "metadata": metadata, "spec": {"template": template}}
        )
    counts = []
    for command in commands:
        if command[0] == "helm":
            asked = {"paused": True} if "paused=true" in command else {}
            assert command[1] == "upgrade"
            release.upgrade(overlaid(values, asked))
            counts.append({name: one["spec"].get("replicas", 1) for name, one in deployments(release).items()})
        elif command[3] == "delete":
            selector = command[command.index("-l") + 1]
            for job in release.cluster.store.list("Job", release.namespace):
                if labels_match(selector, job["metadata"].get("labels") or {}):
                    release.cluster.delete("Job", job["metadata"]["name"], release.namespace)
    stopped, started = counts
    assert set(stopped.values()) == {0}
    assert started["trial-noetl-dagster-api"] == 3
    assert all(started.values()), "pools that are scaled begin with one worker"
    assert {one["metadata"]["name"] for one in release.cluster.store.list("Job", release.namespace)} == {"others"}


def deployments(release: Release) -> dict[str, Object]:
    found = release.cluster.store.list("Deployment", release.namespace)
    return {one["metadata"]["name"]: one for one in found}


def test_a_changed_secret_rolls_its_pods_at_the_next_upgrade(recorded: Release) -> None:
    release = recorded
    given(release)
    release.install(SCENARIOS["minimal"])
    sums = [checksums(release)]
    release.upgrade(SCENARIOS["minimal"])
    sums.append(checksums(release))
    key = ("Secret", release.namespace, "noetl")
    release.cluster.store.update(key, lambda found: found["data"].update({"NOETL_DB_URL": "b3RoZXI="}))
    release.upgrade(SCENARIOS["minimal"])
    sums.append(checksums(release))
    assert sums[0] == sums[1]
    assert all(sums[2][name] != one for name, one in sums[1].items())


def checksums(release: Release) -> dict[str, str]:
    return {
        name: one["spec"]["template"]["metadata"]["annotations"]["checksum/secrets"]
        for name, one in deployments(release).items()
    }


def test_helm_leaves_the_number_to_who_scales_where_values_say_so(recorded: Release) -> None:
    """Helm 4 applies on the server, which knows who has scaled."""
    release, name = recorded, "trial-noetl-dagster-api"
    given(release)

    def scaled_and_upgraded(replicas: int | None) -> int:
        values = overlaid(SCENARIOS["minimal"], {"api": {"replicas": replicas}})
        release.upgrade(values) if release.helm.list() else release.install(values)
        with config.new_client_from_config(str(release.cluster.kubeconfig)) as api:
            client.AppsV1Api(api).patch_namespaced_deployment_scale(
                name, release.namespace, {"spec": {"replicas": 5}}, field_manager="kubectl"
            )
        release.upgrade(overlaid(values, {"settings": {"NOETL_RETENTION_DAYS": 7}}))
        return int(deployments(release)[name]["spec"]["replicas"])

    assert scaled_and_upgraded(None) == 5
    with pytest.raises(HelmError, match=r'conflict.*"kubectl".*\.spec\.replicas'):
        scaled_and_upgraded(2)
