"""Buckets of tools: obstore clients for a credential, or for the object store of the settings."""

from __future__ import annotations

from typing import Any

from obstore.store import GCSStore, S3Store

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credentials import Credential


def open_bucket(settings: Settings, kind: str, bucket: str, credential: Credential | None = None) -> Any:
    """Returns an obstore client of a bucket.

    Args:
        kind: ``s3`` (also ``minio``) or ``gcs``.
        bucket: its name; empty: the one of the credential or the settings.
        credential: None: the settings' minio endpoint for s3 if there is one, else the environment.

    Raises:
        CredentialError: no bucket is named.
    """
    own = credential.get("bucket", default="") if credential else ""
    default = settings.gcs_bucket if kind == "gcs" else settings.minio_bucket
    name = bucket or own or default
    if not name:
        raise CredentialError(f"no bucket is named for {kind}; write it in the path or in the credential")
    return _gcs(settings, name, credential) if kind == "gcs" else _s3(settings, name, credential)


def _s3(settings: Settings, bucket: str, credential: Credential | None) -> S3Store:
    options: dict[str, Any] = {"region": settings.minio_region, "virtual_hosted_style_request": False}
    if credential is not None:
        options |= {
            "endpoint": credential.get("endpoint", "endpoint_url"),
            "access_key_id": credential.get("access_key_id", "access_key", "key_id"),
            "secret_access_key": credential.get("secret_access_key", "secret_key", "secret"),
            "token": credential.get("session_token"),
            "region": credential.get("region", default=settings.minio_region),
        }
    elif settings.minio_endpoint is not None:
        options |= {
            "endpoint": settings.minio_endpoint,
            "access_key_id": settings.minio_access_key,
            "secret_access_key": settings.minio_secret_key.get_secret_value(),
            "session_token": settings.minio_session_token.get_secret_value() or None,
        }
    options = {name: value for name, value in options.items() if value is not None}
    insecure = str(options.get("endpoint", "")).startswith("http://")
    own = credential is None and settings.minio_endpoint is not None
    client: Any = {"allow_http": insecure, "allow_invalid_certificates": own and not settings.minio_verify}
    return S3Store(bucket, config=options, client_options=client)


def _gcs(settings: Settings, bucket: str, credential: Credential | None) -> GCSStore:
    options: dict[str, Any] = {}
    if credential is not None:
        options["service_account_key"] = credential.get("service_account_key", "service_account", "key")
        options["service_account_path"] = credential.get("service_account_path", "keyfile")
    return GCSStore(bucket, config={name: value for name, value in options.items() if value is not None})
