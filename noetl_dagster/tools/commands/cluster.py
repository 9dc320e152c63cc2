"""Requests of tools to the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError, kind_of_status
from noetl_dagster.extras import needs_extra
from noetl_dagster.process.redaction import SECRETS

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
EXCERPT = 500

NO_RIGHT = "the Helm chart gives the right to create Jobs with runs.containers and workers.containers"

TIMES = (5.0, 30.0)
"""Seconds to connect to the API server, and to wait for its response; its client would wait for ever."""


def connect(asker: str) -> tuple[Any, Any]:
    """Returns the configured cluster's clients of jobs (``BatchV1Api``) and of pods (``CoreV1Api``).

    Args:
        asker: the caller, for error messages; likewise below.

    Raises:
        ToolError: no client is installed, or no cluster is configured.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise ToolError(needs_extra(asker, "k8s"), kind="policy") from None
    try:
        config.load_config()  # a kubeconfig, else the pod's own service account
    except config.ConfigException:
        raise ToolError(
            f"{asker}: no Kubernetes client is configured; set KUBECONFIG, or run inside a cluster; {NO_RIGHT}",
            kind="credential",
        ) from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 0  # the callers repeat their requests
    api = client.ApiClient(configuration)
    return client.BatchV1Api(api), client.CoreV1Api(api)


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
