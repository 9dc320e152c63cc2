"""``kind: container``: a Kubernetes Job, watched to its end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from noetl_dagster.errors import ToolError, kind_of_status
from noetl_dagster.tools.base import JobMessages, Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.commands.pipes import pipes_variables
from noetl_dagster.tools.limits import time_limit
from noetl_dagster.tools.scripts import load_script

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POLL_SECONDS = 2.0
KEPT_SECONDS = 3600
LOG_BYTES = 1_048_576
EXCERPT = 500


_OF_CONTAINER = {
    "resources": "resources",
    "env_from": "envFrom",
    "volume_mounts": "volumeMounts",
    "working_dir": "workingDir",
    "image_pull_policy": "imagePullPolicy",
    "security_context": "securityContext",
}
_OF_POD = {
    "service_account": "serviceAccountName",
    "volumes": "volumes",
    "node_selector": "nodeSelector",
    "tolerations": "tolerations",
}
"""Fields that go as they are, with Kubernetes' names for them."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    batch: Any
    core: Any


class ContainerTool(Tool):
    """Runs an image once.

    Input: ``image``; ``command`` (text for ``/bin/sh -c``, or a list) or ``script``; ``args``; ``env``;
    ``resources`` as Kubernetes writes them; ``namespace`` (default: the pod's own, else the
    kubeconfig's, else ``default``); ``service_account``; ``timeout`` seconds; as Kubernetes writes them too
    ``env_from``, ``volume_mounts``, ``security_context`` (of the container), ``working_dir``, ``image_pull_policy``,
    ``volumes``, ``node_selector``, ``tolerations``, ``image_pull_secrets`` (names will do), ``labels`` and
    ``annotations`` of job and pod. ``pipes: true`` as for shell: the messages come by objects of the minio store, to
    which the job needs a client of its own.

    Output: ``{job, namespace, pod, exit_code, stdout}``; of a long log the last mebibyte.

    Raises ``ToolError``: without a configured Kubernetes client, for a job that cannot
    be made, and for an exit code other than 0. The job is deleted in every case.
    """

    kind = "container"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        cluster = await asyncio.to_thread(_connect, call)
        namespace = str(call.config.get("namespace") or await asyncio.to_thread(_own_namespace))
        script = await load_script(call, box)
        async with pipes_variables(call, box, JobMessages.OBJECTS) as variables:
            return await self._run(call, box, cluster, namespace, job_manifest(call, script, variables))

    async def _run(
        self, call: ToolCall, box: Toolbox, cluster: _Cluster, namespace: str, manifest: dict[str, Any]
    ) -> ToolResult:
        name = manifest["metadata"]["name"]
        creating = asyncio.ensure_future(
            _asked(call, cluster.batch.create_namespaced_job, namespace, manifest)
        )
        try:
            await asyncio.shield(creating)
            async with time_limit(call):
                succeeded = await _ended(call, cluster, namespace, name, box)
            pod, exit_code, log = await _asked(call, _outcome, cluster, namespace, name)
        finally:
            await asyncio.shield(_removed(creating, call, cluster, namespace, name))
        log = box.credentials.redact(log)
        if not succeeded:
            raise ToolError(
                f"container in step {call.step}: job {name} ended with exit code {exit_code}: "
                f"{log.strip()[-EXCERPT:]}",
                kind="unknown",
                code=exit_code,
            )
        data = {"job": name, "namespace": namespace, "pod": pod, "exit_code": exit_code, "stdout": log}
        return ToolResult(data=data)


def job_manifest(
    call: ToolCall, script: str | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The Job of a call: one pod, never restarted, removed an hour after its end if nobody does before.

    Args:
        variables: of its environment, beside those of the task.

    Raises:
        ToolError: without an image.
    """
    config = call.config
    if not config.get("image"):
        raise ToolError(f"container in step {call.step} has no 'image'", kind="schema")
    command = config.get("command") if script is None else script
    container: dict[str, Any] = {"name": "main", "image": str(config["image"])}
    if isinstance(command, list | tuple):
        container["command"] = [str(part) for part in command]
    elif command:
        container["command"] = ["/bin/sh", "-c", str(command)]
    if config.get("args"):
        container["args"] = [str(part) for part in config["args"]]
    container["env"] = [*_variables(config.get("env")), *_variables(variables)]
    container |= _given(config, _OF_CONTAINER)
    labels = {
        **_texts(config.get("labels")),
        "app.kubernetes.io/managed-by": "noetl-dagster",
        "noetl/execution-id": str(call.execution_id),
        "noetl/step": _label(call.step),
    }
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    pod |= _given(config, _OF_POD)
    if config.get("image_pull_secrets"):
        secrets = config["image_pull_secrets"]
        named = [secrets] if isinstance(secrets, str) else secrets
        pod["imagePullSecrets"] = [{"name": one} if isinstance(one, str) else one for one in named]
    metadata: dict[str, Any] = {"labels": labels}
    if config.get("annotations"):
        metadata["annotations"] = _texts(config["annotations"])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"noetl-{_label(call.step).lower()[:40]}-{uuid4().hex[:8]}", **metadata},
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": metadata, "spec": pod},
        },
    }


def _given(config: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """What a task says in Kubernetes' own words, by those."""
    return {name: config[field] for field, name in fields.items() if config.get(field)}


def _texts(given: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in (given or {}).items()}


def _variables(env: Any) -> list[dict[str, Any]]:
    if isinstance(env, Mapping):
        return [{"name": str(name), "value": str(value)} for name, value in env.items()]
    return [dict(entry) for entry in env or ()]


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:63] or "step"


def _connect(call: ToolCall) -> _Cluster:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ToolError(
            f"container in step {call.step}: no Kubernetes client is installed; install noetl-dagster[k8s]",
            kind="unknown",
        ) from None
    try:
        config.load_config()  # a kubeconfig, else the pod's own service account
    except config.ConfigException:
        raise ToolError(
            f"container in step {call.step}: no Kubernetes client is configured; set KUBECONFIG, or run "
            "inside a cluster",
            kind="credential",
        ) from None
    return _Cluster(client.BatchV1Api(), client.CoreV1Api())


def _own_namespace() -> str:
    """The namespace of this pod, else of the kubeconfig's context, else ``default``."""
    from kubernetes import config

    if NAMESPACE.is_file():
        return NAMESPACE.read_text().strip()
    try:
        _, context = config.list_kube_config_contexts()
    except config.ConfigException:
        return "default"
    return str(context["context"].get("namespace") or "default")


def _message(body: Any) -> str:
    """What Kubernetes says in the answer to a refused request; empty when it says nothing."""
    try:
        answer = json.loads(body or "")
    except ValueError:
        return ""
    return str(answer.get("message") or "") if isinstance(answer, dict) else ""


async def _asked(call: ToolCall, request: Any, *arguments: Any) -> Any:
    """One request to the API server, in a thread."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return await asyncio.to_thread(request, *arguments)
    except ApiException as error:
        raise ToolError(
            f"container in step {call.step}: Kubernetes answered {error.status} {error.reason}"
            + (f": {message[:EXCERPT]}" if (message := _message(error.body)) else ""),
            kind=kind_of_status(error.status or 500),
            status=error.status,
            retryable=error.status in (409, 429) or (error.status or 0) >= 500,
        ) from None
    except HTTPError as error:
        raise ToolError(
            f"container in step {call.step}: the Kubernetes API cannot be reached: {type(error).__name__}",
            kind="connection",
            retryable=True,
        ) from None


async def _ended(call: ToolCall, cluster: _Cluster, namespace: str, name: str, box: Toolbox) -> bool:
    """Waits for the end of a job; whether it succeeded."""
    while True:
        job = await _asked(call, cluster.batch.read_namespaced_job_status, name, namespace)
        if job.status.succeeded:
            return True
        if job.status.failed:
            return False
        box.progress(call, f"job {name} runs")
        await asyncio.sleep(POLL_SECONDS)


def _outcome(cluster: _Cluster, namespace: str, name: str) -> tuple[str, int | None, str]:
    """Pod, exit code and log of a job that ended."""
    pods = cluster.core.list_namespaced_pod(namespace, label_selector=f"job-name={name}").items
    if not pods:
        return "", None, ""
    pod = pods[-1]
    states = [item.state.terminated for item in pod.status.container_statuses or () if item.state.terminated]
    # as bytes: clients of some versions take the text for one and give "b'...'"
    answer = cluster.core.read_namespaced_pod_log(pod.metadata.name, namespace, _preload_content=False)
    log = answer.data[-LOG_BYTES:].decode(errors="replace")
    return pod.metadata.name, states[0].exit_code if states else None, log


async def _removed(
    creating: asyncio.Future[Any], call: ToolCall, cluster: _Cluster, namespace: str, name: str
) -> None:
    """Deletes a job that was made, also when the call was cancelled while the request was under way."""
    await asyncio.wait([creating])
    if creating.exception() is None:
        await _asked(call, _delete, cluster, namespace, name)


def _delete(cluster: _Cluster, namespace: str, name: str) -> None:
    cluster.batch.delete_namespaced_job(name, namespace, propagation_policy="Background")
