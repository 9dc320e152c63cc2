"""What controllers and the kubelet tell of objects."""

from __future__ import annotations

from tests.kubernetes.cluster.kinds import kind_named
from tests.kubernetes.cluster.store import Object, Store


def warn(store: Store, about: Object, reason: str, message: str) -> None:
    """Keeps a warning as an event of an object; a later one of the same reason takes its place."""
    metadata = about["metadata"]
    key = ("Event", metadata["namespace"], f"{metadata['name']}.{reason.lower()}")
    if store.get(*key) is None:
        involved = {"kind": about["kind"], "namespace": key[1], "name": metadata["name"], "uid": metadata["uid"]}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"namespace": key[1], "name": key[2]}}
        fields = {"involvedObject": involved, "type": "Warning", "reason": reason, "message": message}
        store.create(kind_named("Event"), event | fields)
    else:
        store.update(key, lambda found: {**found, "message": message})
