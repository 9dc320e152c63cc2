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

_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN, _DNS_LABEL = re.compile(rf"{_WORD}(\.{_WORD})*"), re.compile(_WORD)
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_QUALIFIED = re.compile(rf"({_WORD}(\.{_WORD})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_ENV_NAME, _KEY = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*"), re.compile(r"[-._a-zA-Z0-9]{1,253}")
_NAMES = {"Service": _SERVICE_NAME, "Namespace": _DNS_LABEL}
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SHORT_NAMES = ("Pod", "Job", "Service", "Namespace")
"""Kinds whose names are names of hosts, of at most 63 characters."""


def validate(kind: Kind, given: Object) -> None:
    """Refuses with 422 an object that does not fit, naming the first field that does not."""
    name = given["metadata"].get("name", "")
    if not _NAMES.get(kind.name, _SUBDOMAIN).fullmatch(name) or len(name) > (63 if kind.name in _SHORT_NAMES else 253):
        raise _invalid(kind, name, "metadata.name", f"{name!r} is no name of the kind")
    for place, labels in _labels(given):
        for key, value in labels.items():
            if not _QUALIFIED.fullmatch(key):
                raise _invalid(kind, name, place, f"{key!r} is no name of a label")
            if not isinstance(value, str) or not _LABEL.fullmatch(value):
                raise _invalid(kind, name, f"{place}[{key}]", f"{value!r} is no value of a label")
    for key in given["metadata"].get("annotations") or {}:
        if not _QUALIFIED.fullmatch(key):
            raise _invalid(kind, name, "metadata.annotations", f"{key!r} is no name of an annotation")
    for key in given.get("data") or () if kind.name in ("ConfigMap", "Secret") else ():
        if not _KEY.fullmatch(key):
            raise _invalid(kind, name, f"data[{key}]", f"{key!r} is no key")
    if not kind.known:
        return
    plain = {**given, "metadata": {k: v for k, v in given["metadata"].items() if k != "managedFields"}}
    error = best_match(_validator(kind).iter_errors(plain))
    if error is not None:
        raise _invalid(kind, name, ".".join(map(str, error.absolute_path)) or "(object)", error.message)
    _pod_references(kind, name, given)


def _labels(given: Object) -> list[tuple[str, dict[str, Any]]]:
    template = _template(given)
    inner = (template.get("metadata") or {}).get("labels") or {}
    return [
        ("metadata.labels", given["metadata"].get("labels") or {}),
        ("spec.template.metadata.labels", inner),
    ]


def _template(given: Object) -> Object:
    """The template of pods, if an object has one."""
    spec = given.get("spec") or {}
    spec = (spec.get("jobTemplate") or {}).get("spec") or spec
    found = spec.get("template") or {}
    return found if isinstance(found, dict) else {}


def _names_of(kind: Kind, name: str, where: str, pod: Object) -> None:
    """Names in a pod: of the form that Kubernetes asks for, and each once."""
    containers = [*(pod.get("initContainers") or ()), *pod["containers"]]
    named: list[tuple[str, list[str], re.Pattern[str]]] = [
        ("containers", [one["name"] for one in containers], _DNS_LABEL),
        ("volumes", [one["name"] for one in pod.get("volumes") or ()], _DNS_LABEL),
    ]
    for one in containers:
        place = f"containers[{one['name']}]"
        named += [
            (f"{place}.env", [entry["name"] for entry in one.get("env") or ()], _ENV_NAME),
            (f"{place}.ports", [port["name"] for port in one.get("ports") or () if "name" in port], _PORT_NAME),
        ]
        paths = [mount["mountPath"] for mount in one.get("volumeMounts") or ()]
        if len(paths) != len(set(paths)):
            raise _invalid(kind, name, f"{where}.{place}.volumeMounts", "must be unique")
    for place, names, form in named:
        for one in names:
            if not form.fullmatch(one):
                raise _invalid(kind, name, f"{where}.{place}", f"{one!r} is no such name")
        if len(names) != len(set(names)) and not place.endswith(".env"):
            raise _invalid(kind, name, f"{where}.{place}", "Duplicate value")


def _pod_references(kind: Kind, name: str, given: Object) -> None:
    """What a schema cannot say: mounts name volumes, selectors match, names are there once."""
    spec = given.get("spec") or {}
    template = given if kind.name == "Pod" else _template(given)
    pod = template.get("spec") if isinstance(template, dict) else None
    if not isinstance(pod, dict) or "containers" not in pod:
        return
    where = "spec" if kind.name == "Pod" else "spec.template.spec"
    _names_of(kind, name, where, pod)
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
