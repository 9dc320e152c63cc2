"""The chart installed, upgraded, rolled back, tested and removed by Helm, in a cluster."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.helm.chart import SCENARIOS, overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.kinds import kind_named
from tests.kubernetes.cluster.selectors import labels_match
from tests.kubernetes.cluster.store import Object
from tests.kubernetes.releases import Release
from tests.waiting import until_now

pytestmark = pytest.mark.slow

DAYS, PORT = "7", 6432
"""What an upgrade changes: a setting, and where the database is."""


@pytest.fixture
def recorded() -> Iterator[Release]:
    """A cluster in which containers are only recorded: ready at once, and a Job's ended."""
    with tempfile.TemporaryDirectory(prefix="noetl-cluster-") as folder:
        cluster = Cluster(Path(folder), images=())
        names = ("NOETL_DB_URL", "NOETL_DAGSTER_DB_URL", "NOETL_NATS_URL", "NOETL_SERVER_TOKEN", "NOETL_SERVICE_TOKENS")
        yield Release(cluster, dict.fromkeys(names, "given"))
        cluster.close()


def names(release: Release) -> dict[str, set[str]]:
    """Names of pods by their components."""
    pods: dict[str, set[str]] = {}
    for pod in release.pods():
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        pods.setdefault(component, set()).add(pod["metadata"]["name"])
    return pods


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


@pytest.mark.parametrize("name", ["kind", "minimal", "gke", "eks"])
def test_a_release_from_its_install_to_its_end(recorded: Release, name: str) -> None:
    release, values = recorded, SCENARIOS[name]
    before = release.objects()
    is_hook = name != "kind"  # its database comes with the release

    release.install(values)
    if is_hook:
        found = when_provisioning_began(release, 0)
        assert found.keys() == {"ConfigMap", "ServiceAccount", "NetworkPolicy", "Job"}
    installed = release.objects()
    first = names(release)
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
    second = names(release)
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
            counts.append({name: one["spec"].get("replicas", 1) for name, one in release.deployments().items()})
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


def test_a_changed_secret_rolls_its_pods_at_the_next_upgrade(recorded: Release) -> None:
    release = recorded
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
        for name, one in release.deployments().items()
    }
