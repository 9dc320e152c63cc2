"""Reads ``spec.kubernetes``, what a run or a step asks of its pod, and checks the fields of ``container`` tasks.

Of a container, keys and types are checked against the models of Kubernetes' official client. The cluster checks
everything else, and reports the path of the field: Jobs are created with strict validation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from noetl_dagster.errors import Place, ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.fields import declarations
from noetl_dagster.playbook.pods import EFFECTS, GPU, OPERATORS, PULL_POLICIES, Amount, Pod
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_open, is_template, suggestion

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
    fields: dict[str, Any] = {}
    for field in declarations(Pod):
        key = block.spelled(*field.spellings) if field.name in _READERS else None
        if key is not None and block[key] is not None:
            fields[field.name] = _READERS[field.name](block, key)
    key = block.spelled("env_from", "envFrom")
    if key is not None and block[key] is not None:
        fields |= _env_from(block, key)
    block.close((*_READERS, "env_from"))
    return block.build(Pod, **fields)


def _text(block: Block, key: str) -> str | None:
    """Reads a text; numbers and booleans are taken as they are written."""
    value = block[key]
    if isinstance(value, dict | list) or value is None or value == "":
        block.error(f"{key} must be text, found {described(value)}", key)
        return None
    text = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if is_template(text):
        block.error(
            f"{key} is no template: pods are described when the playbook is loaded; write the value itself", key
        )
        return None
    return text


def _word(*words: str) -> Callable[[Block, str], str | None]:
    """Makes a reader of one of these words."""

    def read(block: Block, key: str) -> str | None:
        word = _text(block, key)
        if word is not None and word not in words:
            block.error(f"{key} is {word!r}; {suggestion(word, words, 'use one of')}", key)
        return word

    return read


def _amount(block: Block, key: str) -> Amount | None:
    """Reads a quantity, which is request and limit in one, or ``{request, limit}``."""
    if not isinstance(block[key], dict):
        amount = _text(block, key)
        return Amount(request=amount, limit=amount)
    parts = block.child(key)
    assert parts is not None
    spelled = {part: parts.spelled(part, f"{part}s") for part in ("request", "limit")}
    parts.close(spelled)
    amounts = {part: _text(parts, at) for part, at in spelled.items() if at is not None and parts[at] is not None}
    return Amount(**amounts) if amounts else None


def _gpu(block: Block, key: str) -> dict[str, int] | None:
    """Reads a number of GPUs, or a mapping of the cluster's names for devices to numbers."""
    devices = block[key] if isinstance(block[key], dict) else {GPU: block[key]}
    for name, number in devices.items():
        if isinstance(number, bool) or not str(number).strip().isdecimal():
            block.error(f"gpu: {name!r} is {described(number)}; write a whole number, or {{{GPU}: 1}}", key)
            return None
    return {str(name): int(str(number).strip()) for name, number in devices.items()}


def _texts(block: Block, key: str) -> dict[str, str]:
    child = block.child(key)
    texts = {} if child is None else {str(name): _text(child, name) for name in child.values}
    return {name: text for name, text in texts.items() if text is not None}


def _tolerations(block: Block, key: str) -> tuple[dict[str, Any], ...]:
    readers = {"key": _text, "operator": _word(*OPERATORS), "value": _text, "effect": _word(*EFFECTS)}
    tolerations = []
    for entry in block.blocks(key, f"{block.what}, {key}"):
        fields = {name: read(entry, name) for name, read in readers.items() if entry.take(name) is not None}
        seconds = entry.whole("toleration_seconds", "tolerationSeconds")
        entry.close((*readers, "toleration_seconds"))
        tolerations.append(fields if seconds is None else {**fields, "toleration_seconds": seconds})
    return tuple(tolerations)


def _env_from(block: Block, key: str) -> dict[str, tuple[str, ...]]:
    """Reads ``{secrets: [...], config_maps: [...]}``, or Kubernetes' list of ``secretRef`` and ``configMapRef``."""
    if isinstance(block[key], list):
        listed: dict[str, list[str | None]] = {kind: [] for kind in _REFERENCES}
        for entry in block.blocks(key, f"{block.what}, {key}"):
            for kind, names in _REFERENCES.items():
                reference = entry.child(*names)
                if reference is not None and reference.values.get("name") is not None:
                    listed[kind].append(_text(reference, "name"))
            entry.close(("secretRef", "configMapRef"))
        return {kind: tuple(filter(None, names)) for kind, names in listed.items()}
    inner = block.child(key)
    if inner is None:
        return {}
    secrets = inner.names("secrets", "secret")
    config_maps = inner.names("config_maps", "config_map", "configMaps")
    inner.close(("secrets", "config_maps"))
    return {"env_secrets": secrets, "env_config_maps": config_maps}


_READERS: Mapping[str, Callable[[Block, str], Any]] = {
    **dict.fromkeys(("image", "service_account", "priority_class"), _text),
    **dict.fromkeys(("cpu", "memory", "ephemeral_storage"), _amount),
    **dict.fromkeys(("node_selector", "env", "labels", "annotations"), _texts),
    "image_pull_policy": _word(*PULL_POLICIES),
    "gpu": _gpu,
    "tolerations": _tolerations,
}


# -- containers

_TYPES = {
    **dict.fromkeys(("image", "namespace", "service_account", "working_dir", "image_pull_policy"), "str"),
    **dict.fromkeys(("env", "node_selector", "labels", "annotations"), "dict[str, str]"),
    "command": "list[str]",
    "args": "list[str]",
    "env_from": "list[V1EnvFromSource]",
    "resources": "V1ResourceRequirements",
    "volumes": "list[V1Volume]",
    "volume_mounts": "list[V1VolumeMount]",
    "tolerations": "list[V1Toleration]",
    "security_context": "V1SecurityContext",
}
"""The types of fields, in the words of the client's ``openapi_types``."""

_OTHER_FORMS = {("env", True): "list[V1EnvVar]", ("command", False): "str", ("args", False): "object"}
"""The types of fields with two forms, by name and whether a list is written; ``args`` may be the task's input."""

_PART_OF = re.compile(r"^(list|dict)[\[(](?:str, ?)?(\w+)[\])]$")
_SCALARS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str, int, float), "text"),
    "int": ((int,), "a whole number"),
    "bool": ((bool,), "true or false"),
}


def check_container(block: Block) -> None:
    """Reports unknown keys and wrong types in the fields of a container; templates are left to the cluster.

    Without the package ``kubernetes``, only the fields themselves are checked and not the keys below them.
    """
    spellings = {names[0]: names for names in TOOL_KINDS["container"].spellings.values()}
    for name, type_ in _TYPES.items():
        for key in spellings[name]:
            if key in block:
                of_value = _OTHER_FORMS.get((name, isinstance(block[key], list)), type_)
                _check(block.document, block[key], of_value, f"{block.what}: {key}", block.place_of(key))


def _check(document: Document, value: Any, type_: str, what: str, place: Place) -> None:
    """Reports what in a value is not of a type of the client."""
    if is_open(value) or type_ in ("object", "datetime"):
        return
    part = _PART_OF.match(type_)
    expects = {"list": list, "dict": dict}[part[1]] if part else dict
    scalar = _SCALARS.get(type_)
    if scalar is not None:
        types, word = scalar
        if not isinstance(value, types) or (type_ == "int" and isinstance(value, bool)):
            document.report(place, f"{what} must be {word}, found {described(value)}")
    elif not isinstance(value, expects):
        word = "list" if expects is list else "mapping (key: value)"
        document.report(place, f"{what} must be a {word}, found {described(value)}")
    elif part is not None:
        for key, item in enumerate(value) if expects is list else value.items():
            of_item = f"{what} {key + 1}" if expects is list else f"{what}, {key}"
            _check(document, item, part[2], of_item, document.place(value, key))
    else:
        _check_model(document, value, type_, what)


def _check_model(document: Document, value: dict[str, Any], type_: str, what: str) -> None:
    try:
        model = getattr(import_module("kubernetes.client"), type_)
    except ImportError:  # the extra k8s; `check` names it where it is missing
        return
    types = {theirs: model.openapi_types[ours] for ours, theirs in model.attribute_map.items()}
    for key, item in value.items():
        if key in types:
            _check(document, item, types[key], f"{what}, {key}", document.place(value, key))
        elif not is_template(str(key)):
            theirs = model.attribute_map.get(str(key))
            remedy = f"Kubernetes writes {theirs!r}" if theirs else suggestion(str(key), tuple(types))
            message = f"{what}: unknown key {key!r}; {remedy}"
            document.report(document.key_place(value, key), message, kind=ProblemKind.UNKNOWN_FIELD)
