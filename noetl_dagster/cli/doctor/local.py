"""Checks of stores of results, the disk, Spark with its Java, and the playbooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from noetl_dagster.cli.doctor.finding import (
    SECONDS,
    Check,
    Finding,
    connects,
    in_background,
    not_set,
    ok,
    warning,
    wrong,
)
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import configured, probe

STORES = {
    StoreTier.MINIO: "check NOETL_MINIO_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and _BUCKET",
    StoreTier.S3: "check NOETL_S3_BUCKET and the AWS_* variables",
    StoreTier.GCS: "check NOETL_GCS_BUCKET, NOETL_GCS_ENDPOINT and GOOGLE_APPLICATION_CREDENTIALS",
    StoreTier.PVC: "check NOETL_PVC_MOUNT_PATH and who may write there",
}
"""The remedy of each tier."""

STORE_SECONDS = 30.0
"""A client retries for some seconds before it reports that there is no answer."""

LOW_BYTES, TOO_LOW_BYTES = 2 * 1024**3, 200 * 1024**2


def store_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of the stores of results and of the disk."""
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


OLDEST_JAVA = 17
JAVA_REMEDY = f"install Java {OLDEST_JAVA}, or set JAVA_HOME"
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')

CONNECT_PORT, MASTER_PORT, API_PORT = 15002, 7077, 443


def program_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of Spark, Java and the playbooks."""
    yield Check("Spark", partial(_spark, settings), "check NOETL_SPARK_MASTER or NOETL_SPARK_REMOTE")
    yield Check("Java", partial(_java, settings), JAVA_REMEDY)
    yield Check("playbooks", partial(_playbooks, settings), "check NOETL_PLAYBOOKS_PATH")


async def _spark(settings: Settings) -> Finding:
    from noetl_dagster.spark.sessions import check_address

    try:
        own = f"pyspark {version('pyspark')}"
    except PackageNotFoundError:
        return not_set("pyspark is not installed; steps of kind spark need noetl-dagster[spark]")
    check_address(settings)
    address = settings.spark_address
    if settings.spark_remote is not None:
        return ok(f"{own}, Spark Connect at {await connects(address, CONNECT_PORT)} answers")
    if address.startswith("spark://"):
        first = address.partition(",")[0]
        return ok(f"{own}, master at {await connects(first, MASTER_PORT)} answers")
    if address.startswith("k8s://"):
        url = address.removeprefix("k8s://")
        place = await connects(url if "://" in url else f"https://{url}", API_PORT)
        return ok(f"{own}, Kubernetes at {place}")
    return ok(f"{own}, {address}")


async def _java(settings: Settings) -> Finding:
    if settings.spark_remote is not None:
        return not_set("Spark Connect needs none here")
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        if home:
            return wrong(f"JAVA_HOME={home} has no bin/java", JAVA_REMEDY)
        return warning("no java on the PATH: steps of kind spark cannot run", JAVA_REMEDY)
    run = partial(subprocess.run, [java, "-version"], capture_output=True, errors="replace", timeout=SECONDS)
    done = await in_background(run)
    text = done.stderr + done.stdout
    found = _JAVA_VERSION.search(text)
    if found is None:
        return wrong(f"{java} reports no version: {text.strip()[:200]}", JAVA_REMEDY)
    if int(found[1]) < OLDEST_JAVA:
        return wrong(f"Java {found[1]} at {java} is too old", JAVA_REMEDY)
    return ok(f"Java {found[1]} at {java}")


async def _playbooks(settings: Settings) -> Finding:
    folder = settings.playbooks_path
    if not folder.is_dir():
        if "playbooks_path" in settings.model_fields_set:
            return wrong(f"{folder.absolute()} is no folder", "correct NOETL_PLAYBOOKS_PATH")
        return not_set("NOETL_PLAYBOOKS_PATH, and no folder 'playbooks' here")
    count = len(await in_background(lambda: find_playbooks(folder)))
    return ok(f"{count} in {folder.absolute()}; 'noetl-dagster check {folder}' reads them")
