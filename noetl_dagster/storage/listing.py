"""Lists buckets and folders that are not ours: names, sizes and versions, for sensors that observe them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage.locations import split_uri
from noetl_dagster.storage.tiers.gcs import gcs_client

_WILD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object or file.

    Attributes:
        size: bytes.
        version: changes with the content: an ETag, or the time of a file in nanoseconds.
        modified: UTC.
    """

    name: str
    size: int
    version: str
    modified: datetime


def matching(settings: Settings, pattern: str) -> list[ListedObject]:
    """Returns everything that a pattern matches, sorted by name.

    Args:
        pattern: ``s3://bucket/raw/*.parquet`` (at ``NOETL_MINIO_ENDPOINT`` where it is set, else at AWS),
            ``gs://bucket/...``, or a path; ``*`` matches any text, slashes too in buckets.

    Raises:
        StorageError: the bucket is missing or refuses to be read.
    """
    scheme, bucket, key = split_uri(pattern) if "://" in pattern else ("file", "", pattern)
    if scheme == "file":
        return sorted(_files(key), key=lambda one: one.name)
    wanted = key.lstrip("/")
    prefix = _WILD.split(wanted, maxsplit=1)[0]
    try:
        listed = list((_s3 if scheme == "s3" else _gcs)(settings, bucket, prefix))
    except StorageError:
        raise
    except Exception as error:  # each client has errors of its own
        raise StorageError(f"{pattern} cannot be listed: {type(error).__name__}: {error}") from error
    if _WILD.search(wanted):
        listed = [one for one in listed if fnmatchcase(one.name, wanted)]
    elif wanted:  # a folder's name means everything below
        listed = [one for one in listed if f"{one.name}/".startswith(wanted.rstrip("/") + "/")]
    return sorted(listed, key=lambda one: one.name)


def _files(pattern: str) -> Iterator[ListedObject]:
    path = Path(pattern)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207
    for one in found:
        if one.is_file():
            facts = one.stat()
            yield ListedObject(
                str(one), facts.st_size, str(facts.st_mtime_ns), datetime.fromtimestamp(facts.st_mtime, UTC)
            )


def _s3(settings: Settings, bucket: str, prefix: str) -> Iterator[ListedObject]:
    from noetl_dagster.storage.tiers.objects import minio_admin, s3_admin

    client = s3_admin() if settings.minio_endpoint is None else minio_admin(settings)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for one in page.get("Contents", ()):
            yield ListedObject(one["Key"], one["Size"], one["ETag"].strip('"'), one["LastModified"])


def _gcs(settings: Settings, bucket: str, prefix: str) -> Iterator[ListedObject]:
    for blob in gcs_client(settings).list_blobs(bucket, prefix=prefix):
        yield ListedObject(blob.name, blob.size, str(blob.etag), blob.updated)
