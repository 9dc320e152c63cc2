"""Whether objects are what Kubernetes' schemas say, unknown fields and wrong types refused."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.kinds import Kind
from tests.kubernetes.cluster.store import Object

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SHORT_NAMES = ("Pod", "Job", "Service", "Namespace")
"""Kinds whose names are names of hosts, of at most 63 characters."""


def validate(kind: Kind, given: Object) -> None:
    """Refuses with 422 an object that does not fit, naming the first field that does not."""
    name = given["metadata"].get("name", "")
    if not _NAME.fullmatch(name) or len(name) > (63 if kind.name in _SHORT_NAMES else 253):
        raise _invalid(kind, name, "metadata.name", f"{name!r} is no name of the kind")
    for place, labels in _labels(given):
        for key, value in labels.items():
            if not isinstance(value, str) or not _LABEL.fullmatch(value):
                raise _invalid(kind, name, f"{place}[{key}]", f"{value!r} is no value of a label")
    if not kind.known:
        return
    plain = {**given, "metadata": {k: v for k, v in given["metadata"].items() if k != "managedFields"}}
    error = best_match(_validator(kind).iter_errors(plain))
    if error is not None:
        raise _invalid(kind, name, ".".join(map(str, error.absolute_path)) or "(object)", error.message)
    _pod_references(kind, name, given)


def _labels(given: Object) -> list[tuple[str, dict[str, Any]]]:
    template = (given.get("spec") or {}).get("template") or {}
    inner = (template.get("metadata") or {}).get("labels") or {}
    return [
        ("metadata.labels", given["metadata"].get("labels") or {}),
        ("spec.template.metadata.labels", inner),
    ]


def _pod_references(kind: Kind, name: str, given: Object) -> None:
    """What a schema cannot say: mounts name volumes, selectors match, names are there once."""
    spec = given.get("spec") or {}
    template = given if kind.name == "Pod" else spec.get("template") or {}
    pod = template.get("spec") if isinstance(template, dict) else None
    if not isinstance(pod, dict) or "containers" not in pod:
        return
    where = "spec" if kind.name == "Pod" else "spec.template.spec"
    volumes = {volume["name"] for volume in pod.get("volumes") or ()}
    volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or ()}
    for list_name in ("initContainers", "containers"):
        for index, container in enumerate(pod.get(list_name) or ()):
            if not container.get("image"):
                raise _invalid(kind, name, f"{where}.{list_name}[{index}].image", "Required value")
            for at, mount in enumerate(container.get("volumeMounts") or ()):
                if mount["name"] not in volumes:
                    place = f"{where}.{list_name}[{index}].volumeMounts[{at}].name"
                    raise _invalid(kind, name, place, f'Not found: "{mount["name"]}"')
    wanted = (spec.get("selector") or {}).get("matchLabels") if kind.group == "apps" else None
    labels = (template.get("metadata") or {}).get("labels") or {}
    if wanted and any(labels.get(key) != value for key, value in wanted.items()):
        raise _invalid(kind, name, "spec.template.metadata.labels", "`selector` does not match template `labels`")
    if kind.name == "Job" and pod.get("restartPolicy") not in ("Never", "OnFailure"):
        place = f"{where}.restartPolicy"
        raise _invalid(kind, name, place, 'Required value: valid values: "OnFailure", "Never"')


def _invalid(kind: Kind, name: str, field: str, message: str) -> Refused:
    return Refused(422, "Invalid", f'{kind.name} "{name}" is invalid: {field}: {message}')


@cache
def _schemas() -> tuple[Any, Registry[Any]]:
    version = kubernetes_validate.latest_version()
    folder = files("kubernetes_validate").joinpath(f"kubernetes-json-schema/v{version}-local-strict")
    definitions = json.loads(folder.joinpath("_definitions.json").read_text())
    return folder, Resource.from_contents(definitions) @ Registry()


@cache
def _validator(kind: Kind) -> Draft202012Validator:
    folder, registry = _schemas()
    group = f"{kind.group.split('.')[0]}-" if kind.group else ""
    schema = json.loads(folder.joinpath(f"{kind.name.lower()}-{group}{kind.version}.json").read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry)
