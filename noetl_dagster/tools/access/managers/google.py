"""Secrets of Google's Secret Manager, with the credentials of the Google environment."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.managers.asking import PATIENCE_SECONDS

LATEST = "latest"
_FULL = re.compile(r"projects/[^/]+(/locations/[^/]+)?/secrets/[^/]+(/versions/[^/]+)?")
_SHORT = re.compile(r"[^/]+(/versions/[^/]+)?")


def secret(name: str, settings: Settings) -> str:
    """Returns a version of a secret.

    Args:
        name: ``db``, of the project of the environment, or ``projects/p/secrets/db``; either with
            ``/versions/3`` after it, else the latest version.

    Raises:
        CredentialError: there is none, it may not be read, or the Google environment is not complete.
    """
    what = f"secret {name!r} of provider 'google'"
    try:
        from google.api_core import exceptions
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    except ImportError:
        raise CredentialError(_missing(what)) from None
    try:
        client, project = _client(settings.google_secrets_endpoint)
        path = _path(name, what, os.environ.get("GOOGLE_CLOUD_PROJECT") or project)
        # the playbook defines retries: Google's own take a minute
        answer = client.access_secret_version(name=path, retry=None, timeout=PATIENCE_SECONDS)
        return bytes(answer.payload.data).decode()
    except ImportError:
        raise CredentialError(_missing(what)) from None
    except DefaultCredentialsError:
        raise CredentialError(
            f"{what}: no Google credentials; set GOOGLE_APPLICATION_CREDENTIALS or run with a service account"
        ) from None
    except GoogleAuthError as error:
        raise CredentialError(
            f"{what}: the Google credentials give no token ({type(error).__name__}); renew them",
            retryable=bool(getattr(error, "retryable", False)),
        ) from None
    except exceptions.NotFound:
        raise CredentialError(f"{what} is not found; create it, or check project and version") from None
    except exceptions.FailedPrecondition:
        raise CredentialError(f"{what}: this version is disabled or destroyed; add another one") from None
    except (exceptions.PermissionDenied, exceptions.Unauthenticated):
        raise CredentialError(
            f"{what} may not be read; grant roles/secretmanager.secretAccessor on it"
        ) from None
    except (exceptions.ServerError, exceptions.TooManyRequests) as error:
        raise CredentialError(
            f"{what}: Google does not answer ({type(error).__name__}); check network and "
            "NOETL_GOOGLE_SECRETS_ENDPOINT",
            retryable=True,
        ) from None
    except exceptions.GoogleAPICallError as error:
        raise CredentialError(
            f"{what}: Google refuses with {type(error).__name__}: {error.message}"
        ) from None
    except UnicodeDecodeError:
        raise CredentialError(f"{what} is binary; only text can be used") from None


def _missing(what: str) -> str:
    return f"{what} needs google-cloud-secret-manager; install noetl-dagster[google]"


def _path(name: str, what: str, project: str | None) -> str:
    if _FULL.fullmatch(name):
        path = name
    elif not _SHORT.fullmatch(name):
        raise CredentialError(f"{what}: write <secret> or projects/<project>/secrets/<secret>")
    elif not project:
        raise CredentialError(
            f"{what}: no project; set GOOGLE_CLOUD_PROJECT, or name it in the secret's name"
        )
    else:
        path = f"projects/{project}/secrets/{name}"
    return path if "/versions/" in path else f"{path}/versions/{LATEST}"


@lru_cache(maxsize=8)
def _client(endpoint: str | None) -> tuple[Any, str | None]:
    """Returns this process's client, since each client requests its own token, and the project of its credentials."""
    from google.cloud import secretmanager_v1 as api

    if endpoint is not None and endpoint.startswith("http://"):  # an emulator: no TLS and no credentials
        import grpc  # type: ignore[import-untyped]

        service = api.services.secret_manager_service.transports.SecretManagerServiceGrpcTransport
        channel = grpc.insecure_channel(endpoint.removeprefix("http://").rstrip("/"))
        return api.SecretManagerServiceClient(transport=service(channel=channel)), None

    import google.auth

    credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    options = {"api_endpoint": endpoint.removeprefix("https://").rstrip("/")} if endpoint else None
    return api.SecretManagerServiceClient(credentials=credentials, client_options=options), project
