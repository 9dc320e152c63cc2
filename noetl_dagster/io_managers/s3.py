"""``S3Resource`` of dagster-aws as the settings of an object store: what each of its fields means here."""

from __future__ import annotations

import os
from typing import Any

from pydantic import SecretStr

from noetl_dagster.errors import StorageError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_ANYWHERE = "us-east-1"
"""The region that is signed with where an endpoint is named and no region: stores other than Amazon's take any."""


def settings_of(s3: Any) -> dict[str, object]:
    """Fields of ``Settings`` that lead where a resource leads.

    Keys that the resource does not hold are looked up as boto3 does: profile, environment, role. They are those of
    this moment: what expires, expires.

    Raises:
        StorageError: it is no ``S3Resource``, or it says what cannot be done here.
    """
    from dagster_aws.s3 import S3Resource

    if not isinstance(s3, S3Resource):
        raise StorageError(
            f"s3 is {type(s3).__name__}; give an S3Resource of dagster_aws.s3 with its values: of one that is "
            "configured at launch Dagster hands on boto3's client alone"
        )
    if s3.use_unsigned_session:
        raise StorageError("s3: use_unsigned_session: assets are written, which needs keys; leave it out")
    if s3.max_attempts < 1:
        raise StorageError(f"s3: max_attempts is {s3.max_attempts}; the first attempt counts, so 1 at least")
    access_key, secret_key, token, region = _signing(s3)
    endpoint = s3.endpoint_url or next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    if region is None and endpoint is None:
        raise StorageError("s3: no region; set region_name or AWS_DEFAULT_REGION")
    scheme = "https" if s3.use_ssl else "http"
    return {
        "minio_endpoint": endpoint or f"{scheme}://s3.{region}.amazonaws.com",
        "minio_access_key": access_key,
        "minio_secret_key": SecretStr(secret_key),
        "minio_session_token": SecretStr(token or ""),
        "minio_region": region or _ANYWHERE,
        "minio_verify": s3.verify is not False,
        "minio_retries": s3.max_attempts - 1,
    }


def _signing(s3: Any) -> tuple[str, str, str | None, str | None]:
    """Access key, secret key, session token and region."""
    import boto3
    from botocore.exceptions import BotoCoreError

    given = {"aws_access_key_id": s3.aws_access_key_id, "aws_secret_access_key": s3.aws_secret_access_key}
    missing = [name for name, value in given.items() if not value]
    if len(missing) == 1:
        raise StorageError(
            f"s3: {missing[0]} is not set, and the other half of the pair is; set both or none"
        )
    try:
        session = boto3.Session(profile_name=s3.profile_name)
        region = s3.region_name or session.region_name
        if not missing:
            return s3.aws_access_key_id, s3.aws_secret_access_key, s3.aws_session_token, region
        credentials = session.get_credentials()
        if credentials is None:
            raise StorageError(
                "s3: no credentials; set aws_access_key_id and aws_secret_access_key, profile_name, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        frozen = credentials.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token, region
    except BotoCoreError as error:
        raise StorageError(f"s3: {error}; check profile_name and the AWS environment") from error
