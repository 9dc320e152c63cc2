"""The kinds of storage for results. Only the clients of the tiers that are opened are loaded."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING
from uuid import uuid4

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers.base import Tier

if TYPE_CHECKING:
    import asyncpg

READY_SECONDS = 10.0
"""Seconds that a store may take to answer."""

PROBE = b"written and read by noetl-dagster"


def open_tier(tier: StoreTier, settings: Settings, pool: asyncpg.Pool | None) -> Tier:
    """Returns the tier of this name. Nothing is connected or created before the first object.

    Raises ``StorageError`` with the name of the setting if the tier is not configured.
    """
    match tier:
        case StoreTier.MINIO:
            from noetl_dagster.storage.tiers.objects import S3Tier, minio_store

            return S3Tier(
                minio_store(settings),
                settings.minio_bucket,
                name="minio",
                credential=settings.minio_access_key,
                create_bucket=True,
            )
        case StoreTier.S3:
            from noetl_dagster.storage.tiers.objects import S3Tier, s3_store

            store, credential = s3_store(settings), os.environ.get("AWS_ACCESS_KEY_ID")
            credential = credential or "of the AWS environment (AWS_ACCESS_KEY_ID is not set)"
            return S3Tier(store, settings.s3_bucket or "", name="s3", credential=credential)
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
            from noetl_dagster.storage.tiers.base import MemoryTier

            return MemoryTier()
        case StoreTier.EVENTLOG:
            from noetl_dagster.storage.tiers.base import EventLogTier

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


def configured(settings: Settings) -> list[StoreTier]:
    """Returns the tiers whose buckets and mounts are configured."""
    addresses = {
        StoreTier.MINIO: settings.minio_endpoint,
        StoreTier.S3: settings.s3_bucket,
        StoreTier.GCS: settings.gcs_bucket,
        StoreTier.PVC: settings.pvc_mount_path,
    }
    return [tier for tier, value in addresses.items() if value is not None]


async def unready(settings: Settings) -> list[str]:
    """Returns a line for each configured store that cannot be used; empty if all can."""
    problems = await asyncio.gather(*(_unready(tier, settings) for tier in configured(settings)))
    return [line for line in problems if line is not None]


async def _unready(tier: StoreTier, settings: Settings) -> str | None:
    try:
        async with asyncio.timeout(READY_SECONDS):
            opened = open_tier(tier, settings, None)
            await opened.ready()
            await opened.close()
    except StorageError as error:
        return str(error)
    except TimeoutError:
        return f"{tier} tier: no answer within {READY_SECONDS:g} s"
    return None


async def probe(tier: StoreTier, settings: Settings) -> str:
    """Writes, reads and removes an object in a tier. Returns its location, for messages."""
    opened = open_tier(tier, settings, None)
    folder = f"probe-{uuid4().hex}/"
    try:
        await opened.ready()  # some servers create the bucket of a written object
        uri = await opened.put(f"{folder}object", PROBE)
        try:
            try:
                data = bytes(await opened.get(uri))
            except KeyError:
                raise StorageError(f"{tier} tier: {uri} was written and is not there") from None
            if data != PROBE:
                raise StorageError(f"{tier} tier: {uri} holds other bytes than were written")
        finally:
            await opened.delete(opened.uri(folder).rstrip("/") + "/")
    finally:
        await opened.close()
    return opened.uri("")
