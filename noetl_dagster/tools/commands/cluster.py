"""Requests of tools to the Kubernetes API; reads from pods and events why a Job does not start."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ErrorKind, ToolError, kind_of_status
from noetl_dagster.process.redaction import SECRETS

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
EXCERPT = 500

NO_RIGHT = "the Helm chart gives the right to create Jobs with runs.containers and workers.containers"

TIMES = (5.0, 30.0)
"""Seconds to connect to the API server, and to wait for its response; its client would wait for ever."""


def own_namespace() -> str:
    """Returns the namespace of this pod, else of the kubeconfig's context, else ``default``."""
    from kubernetes import config

    if NAMESPACE.is_file():
        return NAMESPACE.read_text().strip()
    try:
        _, context = config.list_kube_config_contexts()
    except config.ConfigException:
        return "default"
    return str(context["context"].get("namespace") or "default")


async def ask_cluster(asker: str, request: Any, *arguments: Any, **options: Any) -> Any:
    """Sends one request to the API server, in a thread.

    Raises:
        ToolError: Kubernetes refused; ``status`` is that of the response, None without one.
    """
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return await asyncio.to_thread(request, *arguments, **options, _request_timeout=TIMES)
    except ApiException as error:
        response = None
        with suppress(ValueError):
            response = json.loads(error.body or "")
        message = SECRETS.redact(str(response.get("message") or "")) if isinstance(response, dict) else ""
        hint = f"; {NO_RIGHT}" if error.status == 403 and 'resource "jobs"' in message else ""
        said = f"{': ' if message else ''}{message[:EXCERPT]}{hint}"
        raise ToolError(
            f"{asker}: Kubernetes answered {error.status} {error.reason}{said}",
            kind=kind_of_status(error.status or 500),
            status=error.status,
            retryable=error.status in (409, 429) or (error.status or 0) >= 500,
        ) from None
    except HTTPError as error:
        message = f"{asker}: the Kubernetes API cannot be reached: {type(error).__name__}"
        raise ToolError(message, kind="connection", retryable=True) from None


async def delete_job(asker: str, batch: Any, job: Any) -> bool:
    """Deletes a job with its pod; returns false if it is gone, or another one has its name."""
    options = {"propagationPolicy": "Background", "preconditions": {"uid": job.metadata.uid}}
    name, namespace = job.metadata.name, job.metadata.namespace
    try:
        await ask_cluster(asker, batch.delete_namespaced_job, name, namespace, body=options)
    except ToolError as error:
        if error.status not in (404, 409):
            raise
        return False
    return True


LOOK_SECONDS = 10.0

Ask = Callable[..., Awaitable[Any]]

_IMAGE: tuple[ErrorKind, str] = (
    "not_found",
    "check the name of the image, and image_pull_secrets if its registry asks for a login",
)
_CONTAINER: tuple[ErrorKind, str] = ("client_error", "check command, working_dir, volume_mounts and security_context")
_MEANINGS: dict[str, tuple[ErrorKind, str]] = {
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": ("schema", "correct the name of the image"),
    "ErrImageNeverPull": ("not_found", "load the image on the node, or set image_pull_policy: IfNotPresent"),
    "CreateContainerConfigError": ("not_found", "create the Secret or ConfigMap that it names"),
    "CreateContainerError": _CONTAINER,
    "RunContainerError": _CONTAINER,
    "Unschedulable": ("timeout", "add nodes, or change resources, node_selector and tolerations"),
    "FailedCreate": ("auth", "ask the administrators of the namespace to admit the pod, or change it as they ask"),
    "FailedMount": ("not_found", "create the volume that it names"),
    "FailedAttachVolume": ("server_error", "look at the volume and its node"),
    "FailedCreatePodSandBox": ("server_error", "look at the node of the pod"),
}
"""By Kubernetes' reason, the kind of error and the remedy."""

_QUOTA: tuple[ErrorKind, str] = ("rate_limit", "free some of the quota of the namespace, or ask for less in resources")
_FINAL = frozenset({"InvalidImageName", "ErrImageNeverPull"})


@dataclass(frozen=True, slots=True)
class StartProblem:
    """Why a job has no running container, in Kubernetes' words; ``is_final``: it will not pass by itself."""

    reason: str
    message: str
    pod: str

    @property
    def is_final(self) -> bool:
        """Reports that waiting is useless."""
        return self.reason in _FINAL

    def error(self, where: str, seconds: float) -> ToolError:
        """Returns the failure of the call after so many seconds; ``where`` names the call and the job."""
        kind, remedy = _QUOTA if "exceeded quota" in self.message else _MEANINGS[self.reason]
        place = f"pod {self.pod} does not start" if self.pod else "it has no pod"
        waited = "" if self.is_final else f" for {seconds:.0f} s"
        message = " ".join(SECRETS.redact(self.message).split())[:EXCERPT]
        text = f"{where}: {place}{waited}: {self.reason}{f': {message}' if message else ''}; {remedy}"
        return ToolError(text, kind=kind, code=self.reason, retryable=kind in ("rate_limit", "timeout", "server_error"))


class StartWatch:
    """Looks at intervals why a job does not start.

    Args:
        where: the call and the job, for messages.
        patience: seconds for which a problem may last that may pass by itself.
    """

    def __init__(self, where: str, patience: float) -> None:
        self._where, self._patience = where, patience
        self._clock = asyncio.get_running_loop().time
        self._next, self._since = 0.0, math.inf
        self._problem: StartProblem | None = None

    async def look(self, ask: Ask, core: Any, namespace: str, job: str) -> str | None:
        """Returns the reason for which the job does not start, None without one.

        Raises:
            ToolError: it is final, or has lasted too long; or as :func:`start_problem` raises.
        """
        now = self._clock()
        if now >= self._next:
            self._next = now + min(LOOK_SECONDS, self._patience)
            self._problem = await start_problem(ask, core, namespace, job)
            self._since = math.inf if self._problem is None else min(self._since, now)
            if self._problem is not None and (self._problem.is_final or now - self._since >= self._patience):
                raise self._problem.error(self._where, now - self._since)
        return None if self._problem is None else self._problem.reason


async def start_problem(ask: Ask, core: Any, namespace: str, job: str) -> StartProblem | None:
    """Returns why the latest pod of a job does not start; None if it runs, or nothing is wrong so far.

    Without the right to list events, what only events say stays unknown.

    Args:
        ask: sends a request of the client to the API.

    Raises:
        ToolError: the API refuses, or cannot be reached.
    """
    pods = (await ask(core.list_namespaced_pod, namespace, label_selector=f"job-name={job}")).items
    pod = max(pods, key=lambda one: one.metadata.creation_timestamp, default=None)
    if pod is None:
        return await _from_events(ask, core, namespace, "Job", job)
    if pod.status.phase != "Pending":
        return None
    name = pod.metadata.name
    for status in (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())):
        waiting = status.state.waiting if status.state is not None else None
        if waiting is not None and waiting.reason in _MEANINGS:
            return StartProblem(waiting.reason, waiting.message or "", name)
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return StartProblem("Unschedulable", condition.message or "", name)
    return await _from_events(ask, core, namespace, "Pod", name)


async def _from_events(ask: Ask, core: Any, namespace: str, kind: str, name: str) -> StartProblem | None:
    selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
    try:
        events = (await ask(core.list_namespaced_event, namespace, field_selector=selector)).items
    except ToolError as error:
        if error.status != 403:
            raise
        return None
    telling = [event for event in events if event.reason in _MEANINGS]
    latest = max(telling, key=lambda one: str(one.last_timestamp or one.event_time or ""), default=None)
    if latest is None:
        return None
    return StartProblem(latest.reason, latest.message or "", "" if kind == "Job" else name)
