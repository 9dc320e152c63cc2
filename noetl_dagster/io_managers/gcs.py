"""Assets in Google Cloud Storage."""

from typing import ClassVar

from pydantic import Field

from noetl_dagster.io_managers.assets import TieredIOManager
from noetl_dagster.settings import Settings, StoreTier, settings_with


class GcsIOManager(TieredIOManager):
    """Assets in a bucket of Google Cloud Storage, with the credentials of the Google environment."""

    tier: ClassVar[StoreTier] = StoreTier.GCS

    bucket: str | None = Field(None, description="Bucket; default: NOETL_GCS_BUCKET")
    endpoint: str | None = Field(None, description="Endpoint of an emulator; default: Google's own")

    def store_settings(self) -> Settings:
        """Returns the settings of the bucket."""
        return settings_with(gcs_bucket=self.bucket, gcs_endpoint=self.endpoint)
