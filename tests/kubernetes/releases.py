"""Releases of the chart in the stand-in, by Helm's own engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helm_python import Chart, Config

from noetl_dagster.settings import Settings
from tests.helm.chart import NAMESPACE, PATH, RELEASE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.pod_security import LABEL
from tests.kubernetes.cluster.store import Object
from tests.waiting import PROCESS_SECONDS

SECONDS = int(PROCESS_SECONDS)

BELONG_TO_ALL = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}


class Release:
    """A release of the chart, in a namespace that takes only pods of the restricted standard.

    Args:
        secrets: what production has in the Secret ``noetl`` before an install.
    """

    def __init__(self, cluster: Cluster, secrets: Mapping[str, str]) -> None:
        self.cluster, self.name, self.namespace = cluster, RELEASE, NAMESPACE
        metadata = {"name": self.namespace, "labels": {LABEL: "restricted"}}
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        own = {"name": "noetl", "namespace": self.namespace}
        cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": own, "stringData": dict(secrets)})
        self.helm = Config(kubeconfig_path=cluster.kubeconfig, namespace=self.namespace)
        self._chart = Chart.load(PATH)

    def install(self, values: Mapping[str, Any]) -> None:
        self._done(self.helm.install, self._chart, self.name, dict(values), namespace=self.namespace, wait="watcher")

    def upgrade(self, values: Mapping[str, Any]) -> None:
        self._done(self.helm.upgrade, self._chart, self.name, dict(values), namespace=self.namespace, wait="watcher")

    def rollback(self) -> None:
        self._done(self.helm.rollback, self.name, wait="watcher")

    def test(self) -> None:
        self._done(self.helm.test, self.name)

    def uninstall(self) -> None:
        self._done(self.helm.uninstall, self.name, wait="watcher")

    def objects(self) -> dict[tuple[str, str], Object]:
        """What there is in the namespace, but for what every namespace has, events, and Helm's own records."""
        objects = {}
        for kind in self.cluster.store.kinds() - {"Event"}:
            for one in self.cluster.store.list(kind, self.namespace):
                name = one["metadata"]["name"]
                if (kind, name) not in BELONG_TO_ALL and not name.startswith("sh.helm.release."):
                    objects[kind, name] = one
        return objects

    def deployments(self) -> dict[str, Object]:
        objects = self.cluster.store.list("Deployment", self.namespace)
        return {one["metadata"]["name"]: one for one in objects}

    def pods(self, labels: str = "") -> list[Object]:
        """The pods that are not about to go."""
        pods = self.cluster.pods(labels, self.namespace)
        return [one for one in pods if "deletionTimestamp" not in one["metadata"]]

    def names(self, component: str) -> set[str]:
        """Of the pods of a component."""
        return {one["metadata"]["name"] for one in self.pods(f"app.kubernetes.io/component={component}")}

    def _done(self, call: Any, *arguments: Any, **options: Any) -> None:
        """Raises an error of Helm's with what the containers wrote."""
        try:
            call(*arguments, timeout=SECONDS, **options)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.cluster.said()}") from error


def values_for(settings: Settings) -> dict[str, Any]:
    """Values of the chart that lead to the services of a test."""
    return {
        "secrets": {"name": "noetl"},
        "storage": {
            "tier": "minio",
            "minio": {"endpoint": settings.minio_endpoint, "bucket": settings.minio_bucket},
        },
        "settings": {
            "NOETL_NATS_NAMESPACE": settings.nats_namespace,
            "NOETL_WORKER_HEARTBEAT_SECONDS": "0.5",  # a killed worker is noticed soon
            "NOETL_RECOVERY_BACKOFF_SECONDS": "1",
        },
    }


def secrets_for(settings: Settings) -> dict[str, str]:
    return {
        "NOETL_DB_URL": str(settings.db_url),
        "NOETL_DAGSTER_DB_URL": str(settings.dagster_db_url),
        "NOETL_NATS_URL": str(settings.nats_url),
        "NOETL_MINIO_ACCESS_KEY": settings.minio_access_key,
        "NOETL_MINIO_SECRET_KEY": settings.minio_secret_key.get_secret_value(),
        "NOETL_SERVICE_TOKENS": '{"token": ["pool:default", "pool:gpu", "operator", "reader"]}',
        "NOETL_SERVER_TOKEN": "token",
    }


def shared_with_pods(release: Release, folder: Path) -> dict[str, Any]:
    """Values with which pods have a folder of the test's, at its own path, as a claim: they may mount no host's."""
    metadata = {"name": "shared", "namespace": release.namespace}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    release.cluster.create(claim)
    folder.mkdir()
    place = release.cluster.folder / "claims" / release.namespace / "shared"
    place.parent.mkdir(parents=True)
    place.symlink_to(folder)
    return {
        "pod": {
            "extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            "extraVolumeMounts": [{"name": "shared", "mountPath": str(folder)}],
        }
    }
