"""Releases of the chart in the stand-in, by Helm's own engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helm_python import Chart, Config

from tests.helm.chart import NAMESPACE, PATH, RELEASE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.pod_security import LABEL
from tests.kubernetes.cluster.store import Object
from tests.waiting import PROCESS_SECONDS

KINDS = (
    "ConfigMap",
    "CronJob",
    "Deployment",
    "HorizontalPodAutoscaler",
    "Ingress",
    "Job",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
    "StatefulSet",
)
"""What a release may be made of."""

SECONDS = int(PROCESS_SECONDS)

BELONG_TO_ALL = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}


class Release:
    """A release of the chart, in a namespace that takes only pods of the restricted standard.

    Args:
        name: of the release.
    """

    def __init__(self, cluster: Cluster, name: str = RELEASE, namespace: str = NAMESPACE) -> None:
        self.cluster, self.name, self.namespace = cluster, name, namespace
        metadata = {"name": namespace, "labels": {LABEL: "restricted"}}
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.helm = Config(kubeconfig_path=cluster.kubeconfig, namespace=namespace)
        self._chart = Chart.load(PATH)

    def install(self, values: Mapping[str, Any], wait: str = "watcher") -> None:
        self.helm.install(self._chart, self.name, dict(values), namespace=self.namespace, wait=wait, timeout=SECONDS)

    def upgrade(self, values: Mapping[str, Any], wait: str = "watcher") -> None:
        self.helm.upgrade(self._chart, self.name, dict(values), namespace=self.namespace, wait=wait, timeout=SECONDS)

    def rollback(self, wait: str = "watcher") -> None:
        self.helm.rollback(self.name, wait=wait, timeout=SECONDS)

    def test(self) -> None:
        """As ``helm test`` does.

        Raises:
            HelmError: a test has failed.
        """
        self.helm.test(self.name, timeout=SECONDS)

    def uninstall(self) -> None:
        self.helm.uninstall(self.name, wait="watcher", timeout=SECONDS)

    def objects(self) -> dict[tuple[str, str], Object]:
        """What there is in the namespace, but for what every namespace has and Helm's own records."""
        found = {}
        for kind in KINDS:
            for one in self.cluster.store.list(kind, self.namespace):
                name = one["metadata"]["name"]
                if (kind, name) not in BELONG_TO_ALL and not name.startswith("sh.helm.release."):
                    found[kind, name] = one
        return found

    def pods(self, component: str) -> list[Object]:
        """The pods of a component that are not about to go."""
        found = self.cluster.pods(f"app.kubernetes.io/component={component}", self.namespace)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def names(self, component: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.pods(component)}
