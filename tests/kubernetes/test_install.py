"""The chart installed, upgraded, rolled back, tested and removed by Helm, in a cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import RELEASE, SCENARIOS, overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.store import Object
from tests.kubernetes.releases import Release
from tests.waiting import until_now

ITEMS, HELD = 200, 4
PREFIX = f"{RELEASE}-noetl-dagster-"


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
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"NOETL_DB_URL": "postgresql://db/noetl"}}
    release.cluster.create(secret | {"metadata": {"name": "noetl", "namespace": release.namespace}})


def contents(objects: dict[tuple[str, str], Object]) -> dict[tuple[str, str], Any]:
    """What objects say, but for those whose names or addresses each revision makes anew."""
    return {
        key: (one.get("spec"), one.get("data"), one.get("rules"))
        for key, one in objects.items()
        if key[0] not in ("Job", "Pod", "ReplicaSet")
    }


def is_kept(one: Object) -> bool:
    """Data outlives the release, and so do the passwords of its servers."""
    annotations = one["metadata"].get("annotations") or {}
    return one["kind"] == "PersistentVolumeClaim" or annotations.get("helm.sh/resource-policy") == "keep"


@pytest.mark.parametrize(
    "name",
    ["kind", "minimal", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gke", "eks", "official"))],
)
def test_a_release_from_its_install_to_its_end(recorded: Release, name: str) -> None:
    release, values = recorded, SCENARIOS[name]
    given(release)
    before = release.objects()

    release.install(values)
    installed = release.objects()
    first = {component: release.names(component) for component in images(release)}
    release.test()

    release.upgrade(overlaid(values, {"settings": {"NOETL_RETENTION_DAYS": 7}}))
    maps = [one for key, one in release.objects().items() if key[0] == "ConfigMap"]
    assert any(one["data"].get("NOETL_RETENTION_DAYS") == "7" for one in maps)
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
