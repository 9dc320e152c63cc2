"""Secrets of Kubernetes, with a kubeconfig or the service account of the pod."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.managers.asking import PATIENCE_SECONDS


def secret(name: str, settings: Settings) -> Mapping[str, str]:
    """Returns the values of a secret by their keys; binary ones are left out.

    Args:
        name: ``<namespace>/<secret>``.

    Raises:
        CredentialError: there is none, it may not be read, or no cluster is configured.
    """
    what = f"secret {name!r} of provider 'kubernetes'"
    namespace, _, own = name.partition("/")
    if not own or "/" in own:
        raise CredentialError(f"{what}: write <namespace>/<secret>")
    try:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise CredentialError(f"{what} needs the Kubernetes client; install noetl-dagster[k8s]") from None
    try:
        with _client(what) as api:
            found = api.read_namespaced_secret(own, namespace, _request_timeout=PATIENCE_SECONDS)
    except ApiException as error:
        raise _refused(what, namespace, error) from None
    except HTTPError as error:
        raise CredentialError(
            f"{what}: the Kubernetes API cannot be reached ({type(error).__name__}); check KUBECONFIG and network",
            retryable=True,
        ) from None
    return dict(_texts(found.data or {}))


@contextmanager
def _client(what: str) -> Iterator[Any]:
    """Yields a client for this call: the service account's token changes every hour."""
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = 1
    try:
        config.load_kube_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise CredentialError(
                f"{what}: no Kubernetes client is configured; set KUBECONFIG, or run inside a cluster"
            ) from None
    with client.ApiClient(configuration) as api:
        yield client.CoreV1Api(api)


def _refused(what: str, namespace: str, error: Any) -> CredentialError:
    match error.status:
        case 404:
            return CredentialError(f"{what} is not found; create it, or check the namespace")
        case 401:
            return CredentialError(f"{what}: the cluster does not accept the credentials; renew them")
        case 403:
            return CredentialError(
                f"{what} may not be read; allow 'get' on secrets of {namespace} by a Role and its RoleBinding"
            )
    retryable = error.status == 429 or (error.status or 0) >= 500
    return CredentialError(f"{what}: Kubernetes answers {error.status} {error.reason}", retryable=retryable)


def _texts(data: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        try:
            yield key, base64.b64decode(value).decode()
        except UnicodeDecodeError:
            continue
