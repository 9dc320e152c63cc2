"""The environment and the command of a container."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence

from tests.kubernetes.cluster.selectors import field_at
from tests.kubernetes.cluster.store import Object, Store

IMAGE = {
    "PATH": "/opt/noetl/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/var/lib/noetl",
    "PYSPARK_PYTHON": "/opt/noetl/.venv/bin/python",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "NOETL_HOME": "/var/lib/noetl",
    "NOETL_PLAYBOOKS_PATH": "/opt/noetl/playbooks",
    "NOETL_EMBEDDED": "false",
    "NOETL_LOG_FORMAT": "json",
    "DAGSTER_HOME": "/opt/noetl/dagster",
    # the image has the project installed; here the tree is used as it is
    "PYTHONPATH": "/opt/noetl",
    # localhost is the pod's own address, which c-ares would not look up
    "GRPC_DNS_RESOLVER": "native",
}
"""What the image sets."""

CMD = ("noetl-dagster", "serve")
_REFERENCE = re.compile(r"\$(?:\$|\((?P<name>[^)]+)\))")


def check_user(pod: Object, container: Object) -> None:
    """Refuses to start a container as root that must not be; only this project's images name a user.

    Raises:
        Incomplete: the pod or the container says ``runAsNonRoot``, and its user is root.
    """
    stated = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    user = stated.get("runAsUser", 10001 if "noetl-dagster" in container["image"] else 0)
    if stated.get("runAsNonRoot") and user == 0:
        raise Incomplete(f"container has runAsNonRoot and image will run as root (container: {container['name']})")


class Incomplete(Exception):
    """Something that a container refers to is not there.

    Attributes:
        reason: Kubernetes' word for what comes of it.
    """

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


def environment(store: Store, pod: Object, container: Object, address: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a container, of its image, and what every container is given.

    Raises:
        Incomplete: a ConfigMap, a Secret or a key is missing and not optional.
    """
    namespace = pod["metadata"]["namespace"]
    found = {**IMAGE, **given}
    if "JAVA_HOME" in os.environ:
        found["JAVA_HOME"] = os.environ["JAVA_HOME"]
    found["HOSTNAME"] = pod["metadata"]["name"]
    for source in container.get("envFrom") or ():
        kind = "Secret" if "secretRef" in source else "ConfigMap"
        reference = source.get("secretRef") or source.get("configMapRef")
        content = contents(store, kind, namespace, reference["name"], reference.get("optional", False))
        prefix = source.get("prefix", "")
        found |= {f"{prefix}{name}": value.decode() for name, value in content.items()}
    for entry in container.get("env") or ():
        if "valueFrom" in entry:
            value = _looked_up(store, pod, entry["valueFrom"], address)
            if value is None:
                continue
        else:
            value = expanded(str(entry.get("value", "")), found)
        found[entry["name"]] = value
    return {name: value.replace("0.0.0.0", address) for name, value in found.items()}


def command(container: Object, variables: Mapping[str, str], address: str) -> list[str]:
    """What a container runs: its command, else what the image runs with its arguments."""
    words: Sequence[str] = [*(container.get("command") or ()), *(container.get("args") or ())] or CMD
    return [expanded(word, variables).replace("0.0.0.0", address) for word in words]


def contents(store: Store, kind: str, namespace: str, name: str, optional: bool) -> dict[str, bytes]:
    """The keys of a ConfigMap or a Secret.

    Raises:
        Incomplete: it is not there.
    """
    found = store.get(kind, namespace, name)
    if found is None:
        if optional:
            return {}
        raise Incomplete(f'{kind.lower()} "{name}" not found')
    binary = {"Secret": "data", "ConfigMap": "binaryData"}[kind]
    text = {} if kind == "Secret" else found.get("data") or {}
    return {key: value.encode() for key, value in text.items()} | {
        key: base64.b64decode(value) for key, value in (found.get(binary) or {}).items()
    }


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A text with ``$(NAME)`` replaced, where there is such a variable."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else variables.get(match["name"], match[0]), text)


def field(pod: Object, path: str) -> str:
    """What the downward API gives for a path."""
    value = field_at(pod, path)
    if isinstance(value, dict):
        return "\n".join(f'{key}="{one}"' for key, one in sorted(value.items()))
    return "" if value is None else str(value)


def _looked_up(store: Store, pod: Object, source: Object, address: str) -> str | None:
    for name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if name in source:
            reference = source[name]
            optional = reference.get("optional", False)
            content = contents(store, kind, pod["metadata"]["namespace"], reference["name"], optional)
            if reference["key"] in content:
                return content[reference["key"]].decode()
            if optional:
                return None
            raise Incomplete(
                f"couldn't find key {reference['key']} in {kind} {pod['metadata']['namespace']}/{reference['name']}"
            )
    if "fieldRef" in source:
        path = source["fieldRef"]["fieldPath"]
        return address if path == "status.podIP" else field(pod, path)
    raise NotImplementedError(f"no such source of a variable here: {source}")
