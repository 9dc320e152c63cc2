"""Secrets of Kubernetes, with a kubeconfig or the service account of the pod."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import connect_cluster
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
    right = f"allow 'get' on secrets of {namespace} by a Role and its RoleBinding"
    try:
        _, core = connect_cluster(where, right)  # for this call: the service account's token changes every hour
        stored = core.read_namespaced_secret(own, namespace, _request_timeout=PATIENCE_SECONDS)
    except ToolError as error:
        raise CredentialError(str(error)) from None
    except ApiException as error:
        raise _refused(where, right, error) from None
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


def _refused(where: str, right: str, error: Any) -> CredentialError:
    retryable = error.status == 429 or (error.status or 0) >= 500
    match error.status:
        case 404:
            why = " is not found; create it, or check the namespace"
        case 401:
            why = ": the cluster does not accept the credentials; renew them"
        case 403:
            why = f" may not be read; {right}"
        case _:
            why = f": Kubernetes answers {error.status} {error.reason}"
    return CredentialError(f"{where}{why}", retryable=retryable)
