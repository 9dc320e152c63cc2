"""The kinds of objects that the stand-in keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    Attributes:
        group: of its API; empty for the core.
        known: whether the schemas of Kubernetes have it, which those of other projects do not.
    """

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True
    known: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


def _kinds(group: str, version: str, names: str, *, namespaced: bool = True, known: bool = True) -> list[Kind]:
    return [Kind(group, version, name, _plural(name), namespaced, known) for name in names.split()]


def _plural(name: str) -> str:
    text = name.lower()
    if text.endswith("y"):
        return f"{text[:-1]}ies"
    if text.endswith("s") and text != "endpoints":
        return f"{text}es"
    return text if text.endswith("s") else f"{text}s"


KINDS: tuple[Kind, ...] = (
    *_kinds(
        "", "v1", "Pod Service ConfigMap Secret ServiceAccount PersistentVolumeClaim Event Endpoints ResourceQuota"
    ),
    *_kinds("", "v1", "Namespace Node PersistentVolume", namespaced=False),
    *_kinds("apps", "v1", "Deployment ReplicaSet StatefulSet DaemonSet"),
    *_kinds("batch", "v1", "Job CronJob"),
    *_kinds("networking.k8s.io", "v1", "NetworkPolicy Ingress"),
    *_kinds("policy", "v1", "PodDisruptionBudget"),
    *_kinds("autoscaling", "v2", "HorizontalPodAutoscaler"),
    *_kinds("rbac.authorization.k8s.io", "v1", "Role RoleBinding"),
    *_kinds("rbac.authorization.k8s.io", "v1", "ClusterRole ClusterRoleBinding", namespaced=False),
    *_kinds("storage.k8s.io", "v1", "StorageClass", namespaced=False),
    *_kinds("scheduling.k8s.io", "v1", "PriorityClass", namespaced=False),
    *_kinds("monitoring.coreos.com", "v1", "ServiceMonitor PodMonitor PrometheusRule", known=False),
    *_kinds("cilium.io", "v2", "CiliumNetworkPolicy", known=False),
    *_kinds("gateway.networking.k8s.io", "v1", "HTTPRoute", known=False),
    *_kinds("route.openshift.io", "v1", "Route", known=False),
    *_kinds("keda.sh", "v1alpha1", "ScaledObject TriggerAuthentication", known=False),
)

_BY_PLURAL = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}
_BY_NAME = {kind.name: kind for kind in KINDS}


def kind_named(name: str) -> Kind:
    return _BY_NAME[name]


def kind_at(group: str, version: str, plural: str) -> Kind | None:
    """The kind below an address of the API."""
    return _BY_PLURAL.get((group, version, plural))


def groups() -> dict[str, list[str]]:
    """Versions by group, in the order of :data:`KINDS`."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        versions = found.setdefault(kind.group, [])
        if kind.version not in versions:
            versions.append(kind.version)
    return found
