"""IO managers for anybody's Dagster project: assets in MinIO, on a shared volume, in GCS."""

# no annotations from __future__: Dagster looks for ResourceDependency among types, not among texts
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from dagster import ConfigurableIOManager, InputContext, OutputContext, ResourceDependency
from pydantic import Field, PrivateAttr, SecretStr

from noetl_dagster.errors import StorageError
from noetl_dagster.io_managers.assets import AssetIOManager
from noetl_dagster.settings import Settings, StoreTier, settings_with


class TieredIOManager(ConfigurableIOManager):
    """Common face: what is not configured comes from ``NOETL_*`` settings."""

    tier: ClassVar[StoreTier]
    """The tier that assets are kept in."""

    prefix: str = Field("assets", description="Folder below the bucket or mount")
    _inner: AssetIOManager | None = PrivateAttr(None)

    @abstractmethod
    def store_settings(self) -> Settings:
        """The settings this manager's configuration and the environment make together."""

    @property
    def inner(self) -> AssetIOManager:
        if self._inner is None:
            self._inner = AssetIOManager(self.store_settings(), self.tier, self.prefix)
        return self._inner

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        self.inner.handle_output(context, obj)

    def load_input(self, context: InputContext) -> Any:
        return self.inner.load_input(context)


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
        if self.s3 is not None:
            from noetl_dagster.io_managers.s3 import settings_of

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


class PvcIOManager(TieredIOManager):
    """Assets as files below a volume that all workers mount; large Parquet is read in place."""

    tier: ClassVar[StoreTier] = StoreTier.PVC

    mount_path: str | None = Field(None, description="Mount of the volume; default: NOETL_PVC_MOUNT_PATH")

    def store_settings(self) -> Settings:
        mount = None if self.mount_path is None else Path(self.mount_path)
        return settings_with(pvc_mount_path=mount)


class GcsIOManager(TieredIOManager):
    """Assets in a bucket of Google Cloud Storage, with the credentials of the Google environment."""

    tier: ClassVar[StoreTier] = StoreTier.GCS

    bucket: str | None = Field(None, description="Bucket; default: NOETL_GCS_BUCKET")
    endpoint: str | None = Field(None, description="Endpoint of an emulator; default: Google's own")

    def store_settings(self) -> Settings:
        return settings_with(gcs_bucket=self.bucket, gcs_endpoint=self.endpoint)
