"""Secrets of Kubernetes, with a kubeconfig or the service account of the pod."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.managers.asking import PATIENCE_SECONDS


def secret(name: str, where: str, settings: Settings) -> Mapping[str, str]:
    """Returns the values of a secret by their keys; binary ones are left out.

    Args:
        name: ``<namespace>/<secret>``.

    Raises:
        CredentialError: there is none, it may not be read, or no cluster is configured.
    """
    namespace, _, own = name.partition("/")
    if not own or "/" in own:
        raise CredentialError(f"{where}: write <namespace>/<secret>")
    try:
        with _client(where) as api:
            stored = api.read_namespaced_secret(own, namespace, _request_timeout=PATIENCE_SECONDS)
    except ApiException as error:
        raise _refused(where, namespace, error) from None
    except HTTPError as error:
        raise CredentialError(
            f"{where}: the Kubernetes API cannot be reached ({type(error).__name__}); check KUBECONFIG and network",
            retryable=True,
        ) from None
    values = {}
    for key, value in (stored.data or {}).items():
        with suppress(UnicodeDecodeError):
            values[key] = base64.b64decode(value).decode()
    return values


@contextmanager
def _client(where: str) -> Iterator[Any]:
    """Yields a client for this call: the service account's token changes every hour."""
    configuration = client.Configuration()
    configuration.retries = 1
    try:
        config.load_kube_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise CredentialError(
                f"{where}: no Kubernetes client is configured; set KUBECONFIG, or run inside a cluster"
            ) from None
    with client.ApiClient(configuration) as api:
        yield client.CoreV1Api(api)


def _refused(where: str, namespace: str, error: Any) -> CredentialError:
    retryable = error.status == 429 or (error.status or 0) >= 500
    match error.status:
        case 404:
            why = " is not found; create it, or check the namespace"
        case 401:
            why = ": the cluster does not accept the credentials; renew them"
        case 403:
            why = f" may not be read; allow 'get' on secrets of {namespace} by a Role and its RoleBinding"
        case _:
            why = f": Kubernetes answers {error.status} {error.reason}"
    return CredentialError(f"{where}{why}", retryable=retryable)
