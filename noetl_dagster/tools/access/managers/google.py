"""Secrets of Google's Secret Manager, with the credentials of the Google environment."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any

import google.auth
import grpc  # type: ignore[import-untyped]
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud import secretmanager_v1 as api

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.managers.asking import PATIENCE_SECONDS

_FULL = re.compile(r"projects/[^/]+(/locations/[^/]+)?/secrets/[^/]+(/versions/[^/]+)?")
_SHORT = re.compile(r"[^/]+(/versions/[^/]+)?")


def secret(name: str, where: str, settings: Settings) -> str:
    """Returns a version of a secret.

    Args:
        name: ``db``, of the project of the environment, or ``projects/p/secrets/db``; either with
            ``/versions/3`` after it, else the latest version.

    Raises:
        CredentialError: there is none, it may not be read, or the Google environment is not complete.
    """
    try:
        client, project = _client(settings.google_secrets_endpoint)
        path = _path(name, where, os.environ.get("GOOGLE_CLOUD_PROJECT") or project)
        # the playbook defines retries: Google's own take a minute
        answer = client.access_secret_version(name=path, retry=None, timeout=PATIENCE_SECONDS)
        return bytes(answer.payload.data).decode()
    except UnicodeDecodeError:
        raise CredentialError(f"{where} is binary; only text can be used") from None
    except (GoogleAuthError, exceptions.GoogleAPICallError) as error:
        raise _refused(where, error) from None


def _refused(where: str, error: Any) -> CredentialError:
    name, retryable = type(error).__name__, False
    match error:
        case DefaultCredentialsError():
            why = ": no Google credentials; set GOOGLE_APPLICATION_CREDENTIALS or run with a service account"
        case GoogleAuthError():
            why = f": the Google credentials give no token ({name}); renew them"
            retryable = bool(getattr(error, "retryable", False))
        case exceptions.NotFound():
            why = " is not found; create it, or check project and version"
        case exceptions.FailedPrecondition():
            why = ": this version is disabled or destroyed; add another one"
        case exceptions.PermissionDenied() | exceptions.Unauthenticated():
            why = " may not be read; grant roles/secretmanager.secretAccessor on it"
        case exceptions.ServerError() | exceptions.TooManyRequests():
            why = f": Google does not answer ({name}); check network and NOETL_GOOGLE_SECRETS_ENDPOINT"
            retryable = True
        case _:
            why = f": Google refuses with {name}: {error.message}"
    return CredentialError(f"{where}{why}", retryable=retryable)


def _path(name: str, where: str, project: str | None) -> str:
    if _FULL.fullmatch(name):
        path = name
    elif not _SHORT.fullmatch(name):
        raise CredentialError(f"{where}: write <secret> or projects/<project>/secrets/<secret>")
    elif not project:
        raise CredentialError(f"{where}: no project; set GOOGLE_CLOUD_PROJECT, or name it in the secret's name")
    else:
        path = f"projects/{project}/secrets/{name}"
    return path if "/versions/" in path else f"{path}/versions/latest"


@lru_cache(maxsize=8)
def _client(endpoint: str | None) -> tuple[Any, str | None]:
    """Returns this process's client, since each client requests its own token, and the project of its credentials."""
    if endpoint is not None and endpoint.startswith("http://"):  # an emulator: no TLS and no credentials
        service = api.services.secret_manager_service.transports.SecretManagerServiceGrpcTransport
        channel = grpc.insecure_channel(endpoint.removeprefix("http://").rstrip("/"))
        return api.SecretManagerServiceClient(transport=service(channel=channel)), None
    credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    options = {"api_endpoint": endpoint.removeprefix("https://").rstrip("/")} if endpoint else None
    return api.SecretManagerServiceClient(credentials=credentials, client_options=options), project
