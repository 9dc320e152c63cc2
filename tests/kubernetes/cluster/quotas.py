"""Quotas of a namespace: how many pods, and how much they may request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tests.kubernetes.cluster.store import Object, Store


def refusal(store: Store, namespace: str, pod: Object) -> str | None:
    """Why a quota does not admit a pod; None where all do."""
    here = [one for one in store.list("Pod", namespace) if _is_counted(one)]
    for quota in store.list("ResourceQuota", namespace):
        name, hard = quota["metadata"]["name"], quota["spec"].get("hard") or {}
        for resource, most in hard.items():
            asked = _amount(resource, [pod])
            if asked is None:
                return f"failed quota: {name}: must specify {resource}"
            used = _amount(resource, here) or Decimal(0)
            if used + asked > parse_quantity(most):
                return (
                    f"exceeded quota: {name}, requested: {resource}={asked.normalize():f}, "
                    f"used: {resource}={used.normalize():f}, limited: {resource}={most}"
                )
    return None


def _is_counted(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _amount(resource: str, pods: Iterable[Mapping[str, Any]]) -> Decimal | None:
    """How much of a resource pods ask for; None where a container does not say."""
    found = list(pods)
    if resource == "pods":
        return Decimal(len(found))
    part, _, name = resource.rpartition(".")
    total = Decimal(0)
    for pod in found:
        for container in pod["spec"].get("containers") or ():
            stated = ((container.get("resources") or {}).get(part or "requests") or {}).get(name)
            if stated is None:
                return None
            total += parse_quantity(str(stated))
    return total
