"""Assets on a shared volume."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from noetl_dagster.io_managers.assets import TieredIOManager
from noetl_dagster.settings import Settings, StoreTier, settings_with


class PvcIOManager(TieredIOManager):
    """Assets as files below a volume that all workers mount; large Parquet is read in place."""

    tier: ClassVar[StoreTier] = StoreTier.PVC

    mount_path: str | None = Field(None, description="Mount of the volume; default: NOETL_PVC_MOUNT_PATH")

    def store_settings(self) -> Settings:
        """Returns the settings of the mount."""
        mount = None if self.mount_path is None else Path(self.mount_path)
        return settings_with(pvc_mount_path=mount)
