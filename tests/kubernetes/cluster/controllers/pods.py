"""Pods of templates."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping

from tests.kubernetes.cluster.store import Object, owner_of


def make_pod(owner: Object, template: Object, labels: Mapping[str, str], name: str = "") -> Object:
    """A pod of an owner's template.

    Args:
        name: left out, the owner's name with something that tells pods apart.
    """
    metadata = copy.deepcopy(template.get("metadata") or {})
    metadata.pop("creationTimestamp", None)
    metadata.pop("name", None)
    metadata |= {
        "namespace": owner["metadata"]["namespace"],
        "labels": {**(metadata.get("labels") or {}), **labels},
        "ownerReferences": owner_of(owner),
    }
    if name:
        metadata["name"] = name
    else:
        metadata["generateName"] = f"{owner['metadata']['name'][:57]}-"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"])}


def template_hash(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready and stays."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
