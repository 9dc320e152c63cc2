"""The Kubernetes API as tools ask it."""

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
"""Seconds to connect to the API server, and for which it may say nothing; its client would wait for ever."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Kubernetes' clients, as this process may use them."""

    batch: Any
    core: Any


def connect(asker: str) -> Cluster:
    """
    Args:
        asker: who it is that asks, for errors; likewise below.

    Raises:
        ToolError: there is no client, or no cluster that it knows.
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
    configuration.retries = 0  # of what does not answer; whoever asks tries again
    api = client.ApiClient(configuration)
    return Cluster(client.BatchV1Api(api), client.CoreV1Api(api))


def own_namespace() -> str:
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


async def asked(asker: str, request: Any, *arguments: Any, **options: Any) -> Any:
    """One request to the API server, in a thread.

    Raises:
        ToolError: what Kubernetes said; its ``status`` is that of the answer, None where there was none.
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
