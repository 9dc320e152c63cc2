"""Reads ``spec.kubernetes``, what a run or a step asks of its pod, and checks fields that pods and containers share.

Keys and types are checked against the models of Kubernetes' official client. The cluster checks everything else, and
reports the path of the field: Jobs are created with strict validation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from noetl_dagster.errors import Place, ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.document import Document, texts_in
from noetl_dagster.playbook.fields import declarations, spellings_of
from noetl_dagster.playbook.pods import GPU, Amount, Pod
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
    document = block.document
    before = len(document.problems)
    for owner, key, label, text in texts_in([block.values], 0):
        if is_template(text):
            reason = "pods are described when the playbook is loaded; write the value itself"
            document.report(document.place(owner, key), f"{block.what}: {label} is no template: {reason}")
    check_types(block, (field.spellings for field in declarations(Pod)))
    devices, sources = block.take("gpu"), _env_from(block)
    fields = block.fields(
        Pod,
        cpu=_amount(block, "cpu"),
        memory=_amount(block, "memory"),
        ephemeral_storage=_amount(block, "ephemeral_storage"),
        gpu=devices if devices is None or isinstance(devices, dict) else {GPU: devices},
        tolerations=block.items("tolerations"),
        **sources,
    )
    block.close()
    is_mistaken = any(problem.severity == "error" for problem in document.problems[before:])
    return None if is_mistaken else block.build(Pod, **fields)


def _amount(block: Block, name: str) -> Amount | None:
    """Reads a quantity, which is request and limit in one, or ``{request, limit}``."""
    spellings = spellings_of(Pod, name)
    if isinstance(block.take(*spellings), dict):
        return block.nested(Amount, *spellings)
    amount = block.text(*spellings)
    return None if amount is None else Amount(request=amount, limit=amount)


def _env_from(block: Block) -> dict[str, tuple[str | None, ...]]:
    """Reads ``{secrets: [...], config_maps: [...]}``, or Kubernetes' list of ``secretRef`` and ``configMapRef``."""
    key = block.spelled("env_from", "envFrom")
    names: dict[str, tuple[str | None, ...]] = dict.fromkeys(_REFERENCES, ())
    if key is not None and isinstance(block[key], list):
        for entry in block.blocks(key, f"{block.what}, {key}"):
            for kind, spellings in _REFERENCES.items():
                reference = entry.child(*spellings)
                names[kind] += () if reference is None else (reference.text("name"),)
            entry.close()
    elif key is not None and (sources := block.child(key)) is not None:
        names = {
            "env_secrets": sources.names("secrets", "secret"),
            "env_config_maps": sources.names("config_maps", "config_map", "configMaps"),
        }
        sources.close()
    return names


_TYPES = {
    **dict.fromkeys(("image", "image_pull_policy", "namespace", "working_dir"), "str"),
    **dict.fromkeys(("service_account", "priority_class"), "str"),
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


def check_types(block: Block, fields: Iterable[tuple[str, ...]]) -> None:
    """Reports unknown keys and wrong types in fields of a container or a pod, which are named by their spellings.

    Templates are left to the cluster. Without the package ``kubernetes``, only the fields themselves are checked and
    not the keys below them.
    """
    for names in fields:
        for key in names:
            if key in block and names[0] in _TYPES:
                type_ = _OTHER_FORMS.get((names[0], isinstance(block[key], list)), _TYPES[names[0]])
                _check(block.document, block[key], type_, f"{block.what}: {key}", block.place_of(key))


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
