"""What the API server fills into objects, and what it refuses because of other objects."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from tests.kubernetes.cluster import pod_security
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.kinds import Kind
from tests.kubernetes.cluster.kubelet.volumes import ACCOUNT_PATH, account_volume
from tests.kubernetes.cluster.pod_security import violations
from tests.kubernetes.cluster.store import Object, Store

TOKEN = "kube-api-access"


class Admission:
    """Fills objects in place.

    Args:
        address: gives the address of a new service.
    """

    def __init__(self, store: Store, address: Callable[[], str]) -> None:
        self._store, self._address = store, address

    def __call__(self, kind: Kind, given: Object) -> None:
        if kind.known:
            _drop_nulls(given)
        if kind.name == "Secret":
            _decode(given)
        spec = given.get("spec")
        if not isinstance(spec, dict):
            return
        if kind.name == "Pod":
            self._pod(given["metadata"].get("namespace", ""), given, spec)
        elif kind.name == "Service":
            self._service(spec)
        elif kind.name == "PersistentVolumeClaim":
            given["status"] = {"phase": "Bound"}
        elif kind.name == "Job":
            _defaults(spec, backoffLimit=6, completions=1, parallelism=1, suspend=False)
            given.setdefault("status", {})
            template = spec.get("template")
            if isinstance(template, dict) and given["metadata"].get("name"):
                labels = template.setdefault("metadata", {}).setdefault("labels", {})
                if isinstance(labels, dict):
                    labels["job-name"] = given["metadata"]["name"]
        elif kind.name in ("Deployment", "StatefulSet"):
            _defaults(spec, replicas=1)

    def _pod(self, namespace: str, given: Object, spec: Object) -> None:
        if "uid" in given["metadata"] or "nodeName" in spec:  # it was admitted before
            return
        _defaults(spec, restartPolicy="Always", terminationGracePeriodSeconds=30, serviceAccountName="default")
        spec["serviceAccountName"] = spec["serviceAccountName"] or "default"
        spec["nodeName"] = "here"
        given["status"] = {"phase": "Pending"}
        account = self._store.get("ServiceAccount", namespace, spec["serviceAccountName"])
        if account is None:
            raise Refused(
                403,
                "Forbidden",
                f'pods "{given["metadata"].get("name", "")}" is forbidden: error looking up service account '
                f'{namespace}/{spec["serviceAccountName"]}: serviceaccount "{spec["serviceAccountName"]}" not found',
            )
        self._admit(namespace, given, spec)
        mounted = spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True))
        if mounted and isinstance(spec.get("containers"), list):
            spec["volumes"] = [*(spec.get("volumes") or ()), account_volume(TOKEN)]
            for container in [*spec["containers"], *(spec.get("initContainers") or ())]:
                mount = {"name": TOKEN, "mountPath": ACCOUNT_PATH, "readOnly": True}
                container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]

    def _admit(self, namespace: str, given: Object, spec: Object) -> None:
        """Refuses pods that are not restricted, where the namespace takes no others."""
        name = given["metadata"].get("name", "")
        space = self._store.get("Namespace", "", namespace) or {"metadata": {}}
        labels = space["metadata"].get("labels") or {}
        found = violations(spec) if labels.get(pod_security.LABEL) == "restricted" else []
        if found:
            reason = f'violates PodSecurity "restricted:latest": {", ".join(found)}'
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {reason}')

    def _service(self, spec: Object) -> None:
        if not spec.get("clusterIP") and spec.get("type") != "ExternalName":
            spec["clusterIP"] = self._address()
        for port in spec.get("ports") or ():
            if isinstance(port, dict) and "port" in port:
                _defaults(port, protocol="TCP", targetPort=port["port"])


def _defaults(found: Object, **values: Any) -> None:
    for name, value in values.items():
        if found.get(name) is None:
            found[name] = value


def _drop_nulls(found: Object) -> None:
    """A field that is null is not there."""
    for name, value in list(found.items()):
        if value is None:
            del found[name]
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                _drop_nulls(one)


def _decode(secret: Object) -> None:
    written = secret.pop("stringData", None)
    if isinstance(written, dict):
        encoded = {key: base64.b64encode(str(value).encode()).decode() for key, value in written.items()}
        secret["data"] = {**(secret.get("data") or {}), **encoded}
    secret.setdefault("type", "Opaque")
