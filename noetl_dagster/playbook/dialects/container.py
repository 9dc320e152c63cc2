"""Checks the keys and types of a ``container`` task's fields against the models of Kubernetes' official client.

The API server refuses everything else, with the path of the field: the Job is created with strict validation.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from noetl_dagster.errors import Place, ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_open, is_template, suggestion

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
