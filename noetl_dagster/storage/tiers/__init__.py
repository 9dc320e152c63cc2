"""The kinds of storage for results. ``open_tier`` loads only the client of the tier that it opens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers.base import Tier

if TYPE_CHECKING:
    import asyncpg


def open_tier(tier: StoreTier, settings: Settings, pool: asyncpg.Pool | None) -> Tier:
    """Returns the tier of this name. Nothing is connected or created before the first object.

    Raises:
        StorageError: the tier is not configured; names the setting.
    """
    match tier:
        case StoreTier.MINIO:
            from noetl_dagster.storage.tiers.objects import S3Tier, minio_admin, minio_store

            return S3Tier(
                minio_store(settings),
                admin=partial(minio_admin, settings),
                bucket=settings.minio_bucket,
                name="minio",
                credential=settings.minio_access_key,
                create_bucket=True,
            )
        case StoreTier.S3:
            from noetl_dagster.storage.tiers.objects import S3Tier, aws_credential, s3_admin, s3_store

            store = s3_store(settings)
            return S3Tier(
                store,
                admin=s3_admin,
                bucket=settings.s3_bucket or "",
                name="s3",
                credential=aws_credential(),
                create_bucket=False,
            )
        case StoreTier.PVC:
            from noetl_dagster.storage.tiers.files import FileTier

            if settings.pvc_mount_path is None:
                raise StorageError("pvc tier: no volume; set NOETL_PVC_MOUNT_PATH")
            own = settings.pvc_mount_path.absolute().is_relative_to(settings.home.absolute())
            return FileTier(settings.pvc_mount_path, name="pvc", make_root=own)
        case StoreTier.DISK | StoreTier.OBJECT:
            from noetl_dagster.storage.tiers.files import FileTier

            return FileTier(settings.home / "results", name="disk", make_root=True)
        case StoreTier.MEMORY:
            from noetl_dagster.storage.tiers.inline import MemoryTier

            return MemoryTier()
        case StoreTier.EVENTLOG:
            from noetl_dagster.storage.tiers.inline import EventLogTier

            return EventLogTier()
        case StoreTier.KV:
            from noetl_dagster.storage.tiers.kv import KvTier

            return KvTier(settings)
        case StoreTier.GCS:
            from noetl_dagster.storage.tiers.gcs import GcsTier

            return GcsTier(settings)
        case StoreTier.DB:
            from noetl_dagster.storage.tiers.databases import DatabaseTier

            return DatabaseTier(pool)
        case StoreTier.DUCKDB:
            from noetl_dagster.storage.tiers.databases import DuckDbTier

            return DuckDbTier(settings.home / "results.duckdb")
