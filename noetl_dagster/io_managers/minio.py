"""Assets in MinIO, S3 or any other store with the S3 protocol."""

# no annotations from __future__: Dagster looks for ResourceDependency among types, not among texts
from typing import Any, ClassVar

from dagster import ResourceDependency
from pydantic import Field, SecretStr

from noetl_dagster.errors import StorageError
from noetl_dagster.io_managers.assets import TieredIOManager
from noetl_dagster.settings import Settings, StoreTier, settings_with
from noetl_dagster.storage.tiers.objects import aws_endpoint


class MinioIOManager(TieredIOManager):
    """Assets in a bucket of MinIO or any other store with the S3 protocol.

    Examples:
        >>> resources = {"io_manager": MinioIOManager(endpoint="http://minio:9000", bucket="lake")}
        >>> resources = {"io_manager": MinioIOManager(s3=S3Resource(region_name="eu-west-1"), bucket="lake")}
    """

    tier: ClassVar[StoreTier] = StoreTier.MINIO

    s3: ResourceDependency[Any] = Field(
        None,  # type: ignore[arg-type]
        description="S3Resource of dagster_aws, in place of endpoint, keys and region",
    )
    endpoint: str | None = Field(None, description="http://host:port; default: NOETL_MINIO_ENDPOINT")
    access_key: str | None = Field(None, description="Access key; default: NOETL_MINIO_ACCESS_KEY")
    secret_key: str | None = Field(None, description="Secret key, best as EnvVar(...)")
    bucket: str | None = Field(None, description="Bucket, created when missing; default: NOETL_MINIO_BUCKET")
    region: str | None = Field(None, description="Region; MinIO takes any")

    def store_settings(self) -> Settings:
        """Returns the settings of the bucket."""
        if self.s3 is not None:
            own = ("endpoint", "access_key", "secret_key", "region")
            twice = [name for name in own if getattr(self, name) is not None]
            if twice:
                raise StorageError(f"MinioIOManager: s3 stands for {', '.join(twice)}; give one of them")
            return settings_with(minio_bucket=self.bucket, **settings_of(self.s3))
        return settings_with(
            minio_endpoint=self.endpoint,
            minio_access_key=self.access_key,
            minio_secret_key=None if self.secret_key is None else SecretStr(self.secret_key),
            minio_bucket=self.bucket,
            minio_region=self.region,
        )


_ANYWHERE = "us-east-1"
"""The region for an endpoint without a region: stores other than Amazon's accept any."""


def settings_of(s3: Any) -> dict[str, object]:
    """Returns fields of ``Settings`` for the store of an ``S3Resource``.

    boto3 looks up keys that the resource does not contain: profile, environment, role. They are read once, so
    temporary keys expire.

    Raises:
        StorageError: it is no ``S3Resource``, or it has an option that is not supported.
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
    endpoint = s3.endpoint_url or aws_endpoint()
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
    """Returns access key, secret key, session token and region."""
    import boto3
    from botocore.exceptions import BotoCoreError

    keys = {"aws_access_key_id": s3.aws_access_key_id, "aws_secret_access_key": s3.aws_secret_access_key}
    missing = [name for name, value in keys.items() if not value]
    if len(missing) == 1:
        raise StorageError(f"s3: {missing[0]} is not set, and the other half of the pair is; set both or none")
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
