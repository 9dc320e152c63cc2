"""``dagster-k8s/config`` tags of runs and ops, from ``spec.kubernetes`` of the executor and of steps."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import orjson

from noetl_dagster.compiler.executors.pods import POD_TAG
from noetl_dagster.errors import Place, PlaybookError, Problem
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.pods import Pod

CONFIG_TAG = "dagster-k8s/config"


def run_tags(playbook: Playbook) -> dict[str, str]:
    """Returns the tags of a playbook's runs; none if it does not configure their pods."""
    if playbook.pod is None:
        return {}
    return {CONFIG_TAG: _checked(playbook.pod, Place(playbook.file, 1), "executor")}


def op_tags(playbook: Playbook, steps: Iterable[str]) -> dict[str, str]:
    """Returns the tags of the op of some steps; none if none of them asks for a pod.

    Steps that share an op share its pod: the checks refuse a playbook in which two of them ask for others.
    """
    for name in steps:
        step = playbook.step(name)
        if step.spec.pod is not None:
            place = step.place or Place(playbook.file, 1)
            return {POD_TAG: playbook.name, CONFIG_TAG: _checked(step.spec.pod, place, f"step {name!r}")}
    return {}


def config_of(pod: Pod) -> dict[str, Any]:
    """Returns a pod as ``dagster-k8s`` reads it: parts of a container, of a pod's spec and of its metadata."""
    amounts = {"cpu": pod.cpu, "memory": pod.memory, "ephemeral-storage": pod.ephemeral_storage}
    devices = {name: str(number) for name, number in (pod.gpu or {}).items()}
    # the run launcher would fill in one that is missing, and it may contradict the other
    requests = {name: one.request or one.limit for name, one in amounts.items() if one is not None}
    limits = {name: one.limit or one.request for name, one in amounts.items() if one is not None}
    sources = [{"secret_ref": {"name": name}} for name in pod.env_secrets or ()]
    sources += [{"config_map_ref": {"name": name}} for name in pod.env_config_maps or ()]
    container = {
        "image": pod.image,
        "image_pull_policy": pod.image_pull_policy,
        "resources": _without_empty({"requests": {**requests, **devices}, "limits": {**limits, **devices}}),
        "env": [{"name": name, "value": value} for name, value in (pod.env or {}).items()],
        "env_from": sources,
    }
    spec = {
        "node_selector": pod.node_selector,
        "tolerations": list(pod.tolerations or ()),
        "service_account_name": pod.service_account,
        "priority_class_name": pod.priority_class,
    }
    metadata = {"labels": pod.labels, "annotations": pod.annotations}
    parts = {
        "container_config": _without_empty(container),
        "pod_spec_config": _without_empty(spec),
        "pod_template_spec_metadata": _without_empty(metadata),
    }
    return _without_empty(parts)


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _checked(pod: Pod, place: Place, what: str) -> str:
    """Returns the tag's text; raises PlaybookError if ``dagster-k8s`` is installed and refuses it."""
    text = orjson.dumps(config_of(pod), option=orjson.OPT_SORT_KEYS).decode()
    if find_spec("dagster_k8s") is not None:
        from dagster_k8s.job import get_user_defined_k8s_config

        try:
            get_user_defined_k8s_config({CONFIG_TAG: text})
        except Exception as error:
            message = f"{what}: dagster-k8s refuses its kubernetes settings: {error}"
            raise PlaybookError([Problem(place, message)]) from error
    return text
