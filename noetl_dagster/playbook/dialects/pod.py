"""Reads ``spec.kubernetes``: what a run or a step asks of its pod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from noetl_dagster.playbook.dialects import kubernetes as k8s
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.fields import declarations
from noetl_dagster.playbook.pods import GPU, Amount, Pod
from noetl_dagster.playbook.wording import described, is_template

_NO_TEMPLATE = "is no template: pods are described when the playbook is loaded; write the value itself"
_REFERENCES = {
    "env_secrets": ("secretRef", "secret_ref"),
    "env_config_maps": ("configMapRef", "config_map_ref"),
}


def read_pod(spec: Block) -> Pod | None:
    """Reads ``kubernetes`` of a spec; None if it asks for no pod. An empty mapping asks for one like the run's."""
    value = spec.take("kubernetes")
    if value is True:
        return Pod()
    block = None if value is False else spec.child("kubernetes")
    if block is None:
        return None
    found: dict[str, Any] = {}
    for field in declarations(Pod):
        key = block.spelled(*field.spellings) if field.name in _READERS else None
        if key is not None and block[key] is not None:
            found[field.name] = _READERS[field.name](block, key)
    key = block.spelled("env_from", "envFrom")
    if key is not None and block[key] is not None:
        found |= _env_from(block, key)
    block.close((*_READERS, "env_from"))
    return block.build(Pod, **found)


def _is_literal(block: Block, key: str) -> bool:
    """Reports templates: pods are described when the playbook is loaded."""
    if isinstance(block[key], str) and is_template(block[key]):
        block.error(f"{key} {_NO_TEMPLATE}", key)
        return False
    return True


def _checked(check: k8s.Check | None = None) -> Callable[[Block, str], str | None]:
    """Makes a reader of a text that the check accepts; numbers are taken as they are written."""

    def read(block: Block, key: str) -> str | None:
        value = block[key]
        if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
            block.error(f"{key} must be text, found {described(value)}", key)
            return None
        if not _is_literal(block, key):
            return None
        if check is not None:
            check(block, key)
        return str(value).strip()

    return read


def _amount(example: str, least: Decimal = Decimal(0)) -> Callable[[Block, str], Amount | None]:
    """Makes a reader of a quantity, which is request and limit in one, or of ``{request, limit}``."""
    check = k8s.quantity(example, least, zero=False)

    def read(block: Block, key: str) -> Amount | None:
        if not isinstance(block[key], dict):
            if _is_literal(block, key):
                check(block, key)
            return Amount(request=str(block[key]).strip(), limit=str(block[key]).strip())
        parts = block.child(key)
        assert parts is not None
        found: dict[str, str] = {}
        for part in ("request", "limit"):
            at = parts.spelled(part, f"{part}s")
            if at is not None and parts[at] is not None and _is_literal(parts, at):
                check(parts, at)
                found[part] = str(parts[at]).strip()
        parts.close(("request", "limit"))
        if len(found) > 1 and k8s.exceeds(*found.values()):
            request, limit = found.values()
            parts.error(f"request {request} is more than limit {limit}; raise the limit", "request")
        return Amount(**found) if found else None

    return read


def _gpu(block: Block, key: str) -> dict[str, int] | None:
    """Reads a number of GPUs, or a mapping of the cluster's names for devices to numbers."""
    asked = block[key] if isinstance(block[key], dict) else {GPU: block[key]}
    wrong = [found for pair in asked.items() if (found := k8s.devices_wrong("gpu", *pair))]
    for message in wrong[:1]:
        block.error(message, key)
    return None if wrong else {str(name): int(str(number).strip()) for name, number in asked.items()}


def _texts(sort: k8s.TextMapping) -> Callable[[Block, str], dict[str, str]]:
    """Makes a reader of names and texts; numbers and booleans are taken as they are written."""

    def read(block: Block, key: str) -> dict[str, str]:
        child = block.child(key)
        found: dict[str, str] = {}
        for name, value in {} if child is None else child.values.items():
            text = str(value).lower() if isinstance(value, bool) else value
            wrong = k8s.name_wrong(key, name, sort) or k8s.entry_wrong(key, name, text, sort)
            if wrong is None and is_template(str(text)):
                wrong = f"{key}: {name!r} {_NO_TEMPLATE}"
            if wrong is not None:
                block.error(wrong, key)
            found[str(name)] = str(text)
        return found

    return read


def _tolerations(block: Block, key: str) -> tuple[dict[str, Any], ...]:
    words = {"operator": k8s.word(*k8s.OPERATORS), "effect": k8s.word(*k8s.EFFECTS)}
    names = ("key", "operator", "value", "effect")
    found = []
    for entry in k8s.entries(block, key, "{key, operator, value, effect}"):
        given = [name for name in names if entry.take(name) is not None]
        read = {name: _checked(words.get(name))(entry, name) for name in given}
        seconds = entry.whole("toleration_seconds", "tolerationSeconds")
        k8s.check_operator(entry)
        entry.close((*names, "toleration_seconds"))
        found.append(read if seconds is None else {**read, "toleration_seconds": seconds})
    return tuple(found)


def _env_from(block: Block, key: str) -> dict[str, tuple[str, ...]]:
    """Reads ``{secrets: [...], config_maps: [...]}``, or Kubernetes' list of ``secretRef`` and ``configMapRef``."""
    if isinstance(block[key], list):
        listed: dict[str, list[str | None]] = {kind: [] for kind in _REFERENCES}
        for entry in k8s.entries(block, key, "{secretRef: {name: keys}}"):
            for kind, names in _REFERENCES.items():
                reference = entry.child(*names)
                if reference is not None and reference.values.get("name") is not None:
                    listed[kind].append(_checked(k8s.object_name)(reference, "name"))
            entry.close(("secretRef", "configMapRef"))
        return {kind: tuple(filter(None, names)) for kind, names in listed.items()}
    inner = block.child(key)
    if inner is None:
        return {}
    secrets = _names(inner, "secrets", "secret")
    config_maps = _names(inner, "config_maps", "config_map", "configMaps")
    inner.close(("secrets", "config_maps"))
    return {"env_secrets": secrets, "env_config_maps": config_maps}


def _names(block: Block, *names: str) -> tuple[str, ...]:
    found = block.names(*names)
    for wrong in filter(None, map(k8s.object_wrong, found)):
        block.error(wrong, block.present(*names))
    return found


_READERS: Mapping[str, Callable[[Block, str], Any]] = {
    "image": _checked(),
    "image_pull_policy": _checked(k8s.word(*k8s.PULL_POLICIES)),
    "cpu": _amount("500m, 2 or {request: 1, limit: 2}"),
    "memory": _amount("512Mi, 4Gi or {request: 2Gi, limit: 4Gi}", k8s.LEAST_BYTES),
    "ephemeral_storage": _amount("20Gi", k8s.LEAST_BYTES),
    "gpu": _gpu,
    "node_selector": _texts(k8s.LABELS),
    "tolerations": _tolerations,
    "service_account": _checked(k8s.object_name),
    "env": _texts(k8s.VARIABLES),
    "labels": _texts(k8s.LABELS),
    "annotations": _texts(k8s.ANNOTATIONS),
    "priority_class": _checked(k8s.object_name),
}
