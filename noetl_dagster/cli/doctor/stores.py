"""Where results are kept: buckets, mounts, and room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

from noetl_dagster.cli.doctor.finding import Check, Finding, not_set, ok, warning, wrong
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.readiness import configured, probe

STORES = {
    StoreTier.MINIO: "check NOETL_MINIO_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and _BUCKET",
    StoreTier.S3: "check NOETL_S3_BUCKET and the AWS_* variables",
    StoreTier.GCS: "check NOETL_GCS_BUCKET, NOETL_GCS_ENDPOINT and GOOGLE_APPLICATION_CREDENTIALS",
    StoreTier.PVC: "check NOETL_PVC_MOUNT_PATH and who may write there",
}
"""What to look at, by tier."""

STORE_SECONDS = 30.0
"""A client tries again for some seconds before it says that nobody answers."""

LOW_BYTES, TOO_LOW_BYTES = 2 * 1024**3, 200 * 1024**2


def store_checks(settings: Settings) -> Iterator[Check]:
    for tier, remedy in STORES.items():
        yield Check(f"store {tier}", partial(_store, tier, settings), remedy, STORE_SECONDS)
    yield Check("disk", partial(_disk, settings), "check NOETL_HOME")


async def _store(tier: StoreTier, settings: Settings) -> Finding:
    if tier not in configured(settings):
        if tier is settings.default_store_tier:
            return wrong("NOETL_DEFAULT_STORE_TIER, but not set up", STORES[tier])
        return not_set(STORES[tier].removeprefix("check ").partition(",")[0].partition(" and ")[0])
    return ok(f"wrote, read and removed an object in {await probe(tier, settings)}")


async def _disk(settings: Settings) -> Finding:
    folder = settings.home.resolve()
    folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    what = f"{free / 1024**3:.1f} GB free in {folder}"
    if free < TOO_LOW_BYTES:
        return wrong(what, "make room, or set NOETL_HOME to another disk")
    if free < LOW_BYTES:
        return warning(what, "make room before large results do not fit")
    return ok(what)
