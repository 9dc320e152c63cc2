"""Checks that the configured stores can be used; creates missing buckets that may be created."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import open_tier

READY_SECONDS = 10.0
"""Seconds that a store may take to answer."""

_SETTINGS = {
    StoreTier.MINIO: "minio_endpoint",
    StoreTier.S3: "s3_bucket",
    StoreTier.GCS: "gcs_bucket",
    StoreTier.PVC: "pvc_mount_path",
}
"""The setting that configures each tier."""

PROBE = b"written and read by noetl-dagster"


def configured(settings: Settings) -> list[StoreTier]:
    """Returns the tiers whose buckets and mounts are configured."""
    return [tier for tier, name in _SETTINGS.items() if getattr(settings, name) is not None]


async def unready(settings: Settings) -> list[str]:
    """Returns a line for each configured store that cannot be used; empty if all can."""
    found = await asyncio.gather(*(_unready(tier, settings) for tier in configured(settings)))
    return [line for line in found if line is not None]


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
    """Writes, reads and removes an object in a tier. Returns its location, for messages.

    Raises:
        StorageError: one of these fails.
    """
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
