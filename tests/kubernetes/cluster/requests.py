"""What the API does with a request for objects."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.kubernetes.cluster import patches
from tests.kubernetes.cluster.failures import Refused, not_found
from tests.kubernetes.cluster.kinds import Kind, kind_at
from tests.kubernetes.cluster.selectors import fields_match, labels_match
from tests.kubernetes.cluster.store import Change, Key, Object, Store, key_of, now, owned_by
from tests.kubernetes.cluster.validation import validate

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
OWNING = ("Job", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "CronJob")
"""Kinds that others belong to, which go with them."""


@dataclass(frozen=True)
class Address:
    """What a request is about.

    Attributes:
        name: empty for all of a kind.
        part: ``status``, ``log``, ...
    """

    kind: Kind
    namespace: str
    name: str
    part: str

    @property
    def key(self) -> Key:
        return self.kind.name, self.namespace, self.name

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.part}" if self.part else self.kind.plural


def address_of(path: str) -> Address | None:
    """The objects at a path; None for other paths."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        group, rest = "", parts[1:]
    elif parts[0] == "apis" and len(parts) > 2:
        group, rest = parts[1], parts[2:]
    else:
        return None
    if len(rest) < 2:
        return None
    version, *rest = rest
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, part, *_ = [*rest, "", "", ""]
    kind = kind_at(group, version, plural)
    return Address(kind, namespace, name, part) if kind else None


def verb_of(method: str, address: Address, query: Mapping[str, str]) -> str:
    """The word of Kubernetes' roles for what a request does."""
    if not address.name and method == "GET":
        return "watch" if query.get("watch", "").lower() in ("1", "true") else "list"
    return "deletecollection" if not address.name and method == "DELETE" else _VERBS[method]


@dataclass
class Objects:
    """The API's operations on objects.

    Attributes:
        mutate: fills in what the API server would, and refuses what only the whole cluster shows.
    """

    store: Store
    mutate: Callable[[Kind, Object], None]
    _applied: dict[tuple[Key, str], Object] = field(default_factory=dict)

    def list(self, address: Address, query: Mapping[str, str]) -> Object:
        with self.store.frozen():
            found = self.store.list(address.kind.name, address.namespace or None)
            version = self.store.version
        items = [one for one in found if selected(one, query)]
        metadata: Object = {"resourceVersion": str(version)}
        return {
            "kind": f"{address.kind.name}List",
            "apiVersion": address.kind.api_version,
            "metadata": metadata,
            "items": items,
        }

    def create(self, address: Address, given: Object, query: Mapping[str, str]) -> Object:
        kind = address.kind
        new = self._admitted(address, given)
        if kind.namespaced and self.store.get("Namespace", "", address.namespace) is None:
            raise not_found("namespaces", address.namespace)
        if "name" not in new["metadata"] and "generateName" in new["metadata"]:
            probe = {
                **new,
                "metadata": {**new["metadata"], "name": f"{new['metadata']['generateName']}00000"},
            }
        else:
            probe = new
        self.mutate(kind, probe)
        validate(kind, probe)
        new = {**probe, "metadata": new["metadata"]}
        if query.get("dryRun"):
            return new
        return self.store.create(kind, new)

    def replace(self, address: Address, given: Object, query: Mapping[str, str]) -> Object:
        new = self._admitted(address, given)
        return self._changed(address, lambda old: new, query)

    def patch(self, address: Address, content_type: str, body: bytes, query: Mapping[str, str]) -> Object:
        """A strategic merge patch, or what a manager applies, which makes the object where there is none."""
        if content_type == patches.APPLY:
            return self._apply(address, yaml.safe_load(body), query)
        if content_type != patches.STRATEGIC:
            raise Refused(415, "UnsupportedMediaType", f"{content_type} is no form of a patch here")
        given = json.loads(body)
        return self._changed(address, lambda old: patches.merged_strategically(old, given), query)

    def delete(self, address: Address, query: Mapping[str, str], options: Object) -> Object:
        """Deletes an object; a pod ends first, and what the object owns goes or is left as the caller says."""
        found = self.store.need(*address.key)
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted not in (None, found["metadata"]["uid"]):
            raise Refused(409, "Conflict", f"the UID is {found['metadata']['uid']}, not {wanted}")
        policy = query.get("propagationPolicy") or options.get("propagationPolicy")
        # the API's oldest default, which only jobs still have: their pods stay
        if policy is None and address.kind.name == "Job":
            policy = "Orphan"
        grace = query.get("gracePeriodSeconds") or options.get("gracePeriodSeconds")
        self.end(address.key, policy or "Background", None if grace is None else int(grace))
        return found

    def end(self, key: Key, policy: str = "Background", grace: int | None = None) -> None:
        """Removes an object, after its processes where it is a pod, and what belongs to it."""
        found = self.store.get(*key)
        if found is None:
            return
        if key[0] == "Pod" and (found.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            self._leave(key, found, grace)
            return
        self.store.remove(key)
        for _, manager in [pair for pair in self._applied if pair[0] == key]:
            self._applied.pop((key, manager), None)
        if key[0] == "Namespace":
            owned = [one for kind in self.store.kinds() for one in self.store.list(kind, key[2])]
        else:
            owned = [one for kind in self.store.kinds() for one in self.store.list(kind) if owned_by(one, found)]
        for one in owned:
            if policy == "Orphan":
                self._disown(key_of(one["kind"], one))
            else:
                self.end(key_of(one["kind"], one))

    def collect(self) -> None:
        """Removes pods whose owner was deleted while they were being made."""
        owners = {one["metadata"]["uid"] for kind in OWNING for one in self.store.list(kind)}
        for pod in self.store.list("Pod"):
            references = pod["metadata"].get("ownerReferences") or ()
            named = {one["uid"] for one in references if one["kind"] in OWNING}
            if named and not named & owners and "deletionTimestamp" not in pod["metadata"]:
                self.end(key_of("Pod", pod))

    def _disown(self, key: Key) -> None:
        def change(found: Object) -> None:
            found["metadata"].pop("ownerReferences", None)

        self.store.update(key, change)

    def _leave(self, key: Key, pod: Object, grace: int | None) -> None:
        """Asks the kubelet to end a pod; it removes the object when its processes are gone."""
        default = pod["spec"].get("terminationGracePeriodSeconds", 30)

        def change(found: Object) -> None:
            metadata = found["metadata"]
            metadata.setdefault("deletionTimestamp", now())
            metadata["deletionGracePeriodSeconds"] = default if grace is None else grace

        self.store.update(key, change)

    def _apply(self, address: Address, given: Object, query: Mapping[str, str]) -> Object:
        manager = manager_of(query)
        given = self._admitted(address, given)
        found = self.store.get(*address.key)
        if found is None:
            made = self.create(address, given, query)
        else:
            before = self._applied.get((address.key, manager), {})

            def change(old: Object) -> Object:
                return patches.merged_strategically(patches.without_given_up(old, before, given), given)

            made = self._changed(address, change, query)
        if not query.get("dryRun"):
            self._applied[address.key, manager] = copy.deepcopy(given)
        return made

    def _changed(self, address: Address, change: Callable[[Object], Object], query: Mapping[str, str]) -> Object:
        def changed(old: Object) -> Object:
            return self._replaced(address, old, change(old))

        if query.get("dryRun"):
            return changed(self.store.need(*address.key))
        return self.store.update(address.key, changed)

    def _replaced(self, address: Address, old: Object, new: Object) -> Object:
        if address.part == "status":
            return {**old, "status": new.get("status", {})}
        new = copy.deepcopy(new)
        if "status" in old:
            new["status"] = old["status"]
        _keep_fixed(address.kind, old, new)
        self.mutate(address.kind, new)
        validate(address.kind, new)
        return new

    def _admitted(self, address: Address, given: Any) -> Object:
        kind = address.kind
        if not isinstance(given, dict):
            raise Refused(400, "BadRequest", "the body is no object")
        new = copy.deepcopy(given)
        new.setdefault("apiVersion", kind.api_version)
        new.setdefault("kind", kind.name)
        metadata = new["metadata"] = new.get("metadata") or {}
        if (new["apiVersion"], new["kind"]) != (kind.api_version, kind.name):
            raise Refused(400, "BadRequest", f"{new['apiVersion']} {new['kind']} is not {kind.api_version} {kind.name}")
        if kind.namespaced and metadata.setdefault("namespace", address.namespace) != address.namespace:
            raise Refused(400, "BadRequest", "the namespace of the object is not the request's")
        if address.name and metadata.setdefault("name", address.name) != address.name:
            raise Refused(400, "BadRequest", "the name of the object is not the request's")
        if not metadata.get("name") and not metadata.get("generateName"):
            raise Refused(422, "Invalid", f"{kind.name} is invalid: metadata.name: Required value")
        metadata.pop("managedFields", None)
        return new


def manager_of(query: Mapping[str, str]) -> str:
    """The name under which a request changes fields."""
    return query.get("fieldManager") or "unknown"


_FIXED = {
    "Job": ("template", "selector", "completions"),
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates"),
    "DaemonSet": ("selector",),
}


def _keep_fixed(kind: Kind, old: Object, new: Object) -> None:
    for name in _FIXED.get(kind.name, ()):
        before, after = (old.get("spec") or {}).get(name), (new.get("spec") or {}).get(name)
        if before != after:
            raise Refused(
                422,
                "Invalid",
                f'{kind.name} "{new["metadata"]["name"]}" is invalid: spec.{name}: field is immutable',
            )
    if kind.name in ("ConfigMap", "Secret") and old.get("immutable") and _content(old) != _content(new):
        raise Refused(422, "Invalid", f'{kind.name} "{new["metadata"]["name"]}" is invalid: data: field is immutable')


def _content(found: Object) -> tuple[Any, ...]:
    return tuple(found.get(name) for name in ("data", "binaryData", "stringData"))


def selected(found: Object, query: Mapping[str, str]) -> bool:
    """Whether an object is among those that a request selects."""
    labels = found["metadata"].get("labels") or {}
    return labels_match(query.get("labelSelector", ""), labels) and fields_match(query.get("fieldSelector", ""), found)


def concerns(change: Change, address: Address, query: Mapping[str, str]) -> bool:
    """Whether a watch is told of a change."""
    kind, namespace, _ = change.key
    return kind == address.kind.name and address.namespace in ("", namespace) and selected(change.object, query)
