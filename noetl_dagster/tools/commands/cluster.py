"""Requests of tools to the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError, kind_of_status

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
EXCERPT = 500

TIMES = (5.0, 30.0)
"""Seconds to connect to the API server, and to wait for its response; its client would wait for ever."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Kubernetes' clients, with the credentials of this process."""

    batch: Any
    core: Any


def connect(asker: str) -> Cluster:
    """Returns clients for the configured cluster.

    Args:
        asker: the caller, for error messages; likewise below.

    Raises:
        ToolError: no client is installed, or no cluster is configured.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise ToolError(
            f"{asker}: no Kubernetes client is installed; install noetl-dagster[k8s]",
            kind="unknown",
        ) from None
    try:
        config.load_config()  # a kubeconfig, else the pod's own service account
    except config.ConfigException:
        raise ToolError(
            f"{asker}: no Kubernetes client is configured; set KUBECONFIG, or run inside a cluster",
            kind="credential",
        ) from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 0  # the callers repeat their requests
    api = client.ApiClient(configuration)
    return Cluster(client.BatchV1Api(api), client.CoreV1Api(api))


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


def _message(body: Any) -> str:
    """Returns the message in the response to a refused request; empty if there is none."""
    try:
        response = json.loads(body or "")
    except ValueError:
        return ""
    return str(response.get("message") or "") if isinstance(response, dict) else ""


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
        raise ToolError(
            f"{asker}: Kubernetes answered {error.status} {error.reason}"
            + (f": {message[:EXCERPT]}" if (message := _message(error.body)) else ""),
            kind=kind_of_status(error.status or 500),
            status=error.status,
            retryable=error.status in (409, 429) or (error.status or 0) >= 500,
        ) from None
    except HTTPError as error:
        raise ToolError(
            f"{asker}: the Kubernetes API cannot be reached: {type(error).__name__}",
            kind="connection",
            retryable=True,
        ) from None
