"""The Kubernetes Job of a call: its name, by which a resumed call finds it, its manifest, and orphaned jobs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from secrets import token_hex
from types import MappingProxyType
from typing import Any

import orjson
from pydantic.alias_generators import to_camel

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import text_of
from noetl_dagster.setting_types import PodTemplate
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import connect_cluster
from noetl_dagster.tools.base import ToolCall, seconds_of
from noetl_dagster.tools.commands import cluster

logger = logging.getLogger(__name__)

KEPT_SECONDS = 86_400
"""Seconds for which an ended job stays for a process that resumes its command, unless the command's end removes it."""

MARGIN_SECONDS = 60
"""Seconds after the timeout of its call at which a job ends by itself, since its process would have ended it."""

CALL = "noetl/call"  # annotation: the job's call
MADE_OF = "noetl/made-of"  # annotation: a digest of its container's definition
SECRET = "noetl/secret"  # annotation: the Secret with its secret variables, which it owns
COMMAND = "noetl/command"  # label: a digest of its command
EXECUTION = "noetl/execution-id"  # label

OURS = f"app.kubernetes.io/managed-by=noetl-dagster,{EXECUTION}"
"""Selects the jobs of containers; with ``=<id>`` appended those of an execution."""

_SECRET_LABELS = ("app.kubernetes.io/managed-by", EXECUTION, COMMAND)
_AT_ONCE = 100  # executions per listing of orphans
_ASKER = "jobs of containers"

_OF_CONTAINER = (
    "resources",
    "env_from",
    "volume_mounts",
    "working_dir",
    "image_pull_policy",
    "security_context",
)
_OF_POD = ("volumes", "node_selector", "tolerations")
"""Fields that are passed on unchanged; Kubernetes writes them in camel case."""


def job_manifest(
    call: ToolCall,
    script: str | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    secrets: Mapping[str, str] = MappingProxyType({}),
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Returns the Job of a call: one pod, never restarted, removed at the latest a day after its end.

    What the installation says of all such pods is laid under it. Its labels, annotations and node selectors hold
    against a task's.

    Args:
        variables: of its environment, in addition to those of the task.
        secrets: variables that refer to a Secret of the job.
        settings: with the installation's pod and deadline; None: without both.

    Raises:
        ToolError: there is no image, or the timeout is no number.
    """
    config = call.config
    if not config.get("image"):
        raise ToolError(f"container in step {call.step} has no 'image'", kind="schema")
    command = config.get("command") if script is None else script
    container: dict[str, Any] = {"name": "main", "image": str(config["image"])}
    if isinstance(command, list | tuple):
        container["command"] = [text_of(part) for part in command if part is not None]
    elif command:
        container["command"] = ["/bin/sh", "-c", str(command)]
    if config.get("args"):
        container["args"] = [text_of(part) for part in config["args"] if part is not None]
    secret = f"{job_name(call)}-{token_hex(4)}"
    container["env"] = _without_values(_variables(config.get("env")), secret, secrets)
    container |= _given(config, _OF_CONTAINER)
    # neither the name nor the values of the Secret, since tokens are renewed
    # of the task alone: a job goes on when the installation changes its pods
    made_of = _digest(orjson.dumps(container, option=orjson.OPT_SORT_KEYS, default=str).replace(secret.encode(), b""))
    container["env"] += _without_values(_variables(variables), secret, secrets)
    base = settings.container_pod if settings else PodTemplate()
    container = _laid_over(base.container, container)
    labels = {
        **_texts(config.get("labels")),
        **base.metadata.labels,
        "app.kubernetes.io/managed-by": "noetl-dagster",
        EXECUTION: str(call.execution_id),
        COMMAND: command_label(call),
        "noetl/step": _label(call.step),
    }
    own = _given(config, _OF_POD)
    below = {"automountServiceAccountToken": False, **base.spec.model_dump()}
    if config.get("service_account"):
        own |= {"serviceAccountName": config["service_account"], "automountServiceAccountToken": True}
    if config.get("image_pull_secrets"):
        pull_secrets = config["image_pull_secrets"]
        named = [pull_secrets] if isinstance(pull_secrets, str) else pull_secrets
        own["imagePullSecrets"] = [{"name": one} if isinstance(one, str) else one for one in named]
    pod = _laid_over(below, own) | {"restartPolicy": "Never", "containers": [container]}
    pod = _laid_over(pod, {"nodeSelector": below.get("nodeSelector")})
    if config.get("namespace") and "service_account" not in config:
        pod.pop("serviceAccountName", None)  # of the release's namespace
    given_annotations = {**_texts(config.get("annotations")), **base.metadata.annotations}
    annotations = {name: text for name, text in given_annotations.items() if name != SECRET}
    spec: dict[str, Any] = {"backoffLimit": 0, "ttlSecondsAfterFinished": KEPT_SECONDS}
    limit = min((seconds_of(call) or math.inf, call.task.spec.timeout or math.inf))
    if limit < math.inf:
        spec["activeDeadlineSeconds"] = math.ceil(limit) + MARGIN_SECONDS
    elif settings:
        spec["activeDeadlineSeconds"] = math.ceil(settings.container_deadline_seconds)
    metadata: dict[str, Any] = {"labels": labels} | ({"annotations": annotations} if annotations else {})
    marks = {**annotations, CALL: call_name(call), MADE_OF: made_of} | ({SECRET: secret} if secrets else {})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(call), "labels": labels, "annotations": marks},
        "spec": {**spec, "template": {"metadata": metadata, "spec": pod}},
    }


def _laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of a pod or container over those of the installation: mappings are merged, lists are joined.

    A null changes nothing: it would take away what the installation says, without a right.
    """
    merged = dict(base)
    for name, value in own.items():
        below = merged.get(name)
        if value is None:
            continue
        if isinstance(below, Mapping) and isinstance(value, Mapping) and name != "resources":
            merged[name] = _laid_over(below, value)
        elif isinstance(below, list | tuple) and isinstance(value, list | tuple):
            merged[name] = [*below, *(one for one in value if one not in below)]
        else:
            merged[name] = value
    return merged


def secret_variables(call: ToolCall, variables: Mapping[str, str], is_secret: Callable[[str], bool]) -> dict[str, str]:
    """Returns the variables of a call's container whose values contain a secret."""
    pairs = [*_variables(call.config.get("env")), *_variables(variables)]
    texts = {str(one.get("name")): one.get("value") for one in pairs}
    return {name: text for name, text in texts.items() if isinstance(text, str) and is_secret(text)}


def secret_manifest(job: Any, values: Mapping[str, str]) -> dict[str, Any]:
    """Returns the Secret of a job's secret variables. The job owns it, so it is deleted with the job."""
    metadata = job.metadata
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata.name, "uid": metadata.uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata.annotations[SECRET],
            "labels": {name: text for name, text in metadata.labels.items() if name in _SECRET_LABELS},
            "ownerReferences": [owner],
        },
        "immutable": True,
        "stringData": dict(values),
    }


def _without_values(variables: list[dict[str, Any]], secret: str, secrets: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns variables with references to a Secret in place of secret values."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        if (name := variable.get("name")) in secrets
        else variable
        for variable in variables
    ]


def call_name(call: ToolCall) -> str:
    """Returns the identity of a call: the same after a resumption, another for each attempt of a playbook's policy."""
    task = call.task.name
    if call.owner not in ("", call.command_id):  # one command of several in a group
        task = f"{task}@{_digest(call.command_id.encode())}"
    return f"{_owner(call)}/{task}/{call.number}"


def command_label(call: ToolCall) -> str:
    """Returns the label of the call's command, which all its jobs have."""
    return _digest(_owner(call).encode())


def later_number(call: ToolCall, names: Iterable[str]) -> int | None:
    """Returns the highest number of later calls of the same task, by the names of calls; None without one."""
    own = call_name(call).rpartition("/")[0]
    parts = (name.rpartition("/") for name in names)
    numbers = [int(number) for task, _, number in parts if task == own and number.isdecimal()]
    return max((number for number in numbers if number > call.number), default=None)


def _owner(call: ToolCall) -> str:
    return call.owner or call.command_id


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def job_name(call: ToolCall) -> str:
    """Returns at most 53 characters, so that its pods' names contain all of it."""
    return f"noetl-{_label(call.step, 30).lower()}-{_digest(call_name(call).encode())}"


def _given(config: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    return {to_camel(field): config[field] for field in fields if config.get(field)}


def _texts(values: Any) -> dict[str, str]:
    return {str(name): text_of(value) for name, value in (values or {}).items() if value is not None}


def _variables(env: Any) -> list[dict[str, Any]]:
    if isinstance(env, Mapping):
        return [{"name": name, "value": text} for name, text in _texts(env).items()]
    return [dict(entry) for entry in env or ()]


def _label(text: str, length: int = 63) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:length].strip("-") or "step"


IsOver = Callable[[int, str], Awaitable[bool]]
"""Reports whether a command has ended according to the log, by its execution and name."""


async def remove_orphans(is_over: IsOver, executions: Collection[int] | None = None) -> int:
    """Deletes the jobs of ended commands, found by their labels. Returns their number.

    It looks in all namespaces where the process may list jobs so, else in its own. It works only inside a cluster,
    since a kubeconfig elsewhere may name any cluster. Jobs that cannot be deleted now stay for another time.
    ``executions`` limits it to some.
    """
    if not cluster.NAMESPACE.is_file():
        return 0
    count = 0
    ids = list(map(str, sorted(executions or ())))
    runs = [",".join(ids[start : start + _AT_ONCE]) for start in range(0, len(ids), _AT_ONCE)]
    try:
        batch, _ = await asyncio.to_thread(connect_cluster, _ASKER, cluster.NO_RIGHT)
        for selector in [OURS] if executions is None else [f"{OURS} in ({run})" for run in runs]:
            for job in await _listed(batch, selector):
                count += await _removed(batch, job, is_over)
    except ToolError as error:
        logger.warning("%s", error)
    return count


async def _listed(batch: Any, selector: str) -> list[Any]:
    try:
        listed = await cluster.ask_cluster(_ASKER, batch.list_job_for_all_namespaces, label_selector=selector)
    except ToolError as error:
        if error.status != 403:
            raise
        own = await asyncio.to_thread(cluster.own_namespace)
        listed = await cluster.ask_cluster(_ASKER, batch.list_namespaced_job, own, label_selector=selector)
    items: list[Any] = listed.items
    return items


async def _removed(batch: Any, job: Any, is_over: IsOver) -> bool:
    call = (job.metadata.annotations or {}).get(CALL, "")
    command = call.rpartition("/")[0].rpartition("/")[0]
    execution = command.partition(":")[0]
    if not execution.isdecimal() or not await is_over(int(execution), command):
        return False
    try:
        return await cluster.delete_job(_ASKER, batch, job)
    except ToolError as error:
        logger.warning("%s", error)
        return False
