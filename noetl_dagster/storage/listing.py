"""What lies in a bucket or folder that is not ours: names, sizes and versions, for whoever watches it."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage.locations import split_uri
from noetl_dagster.storage.tiers.gcs import shared_client

_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Listed:
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


def matching(settings: Settings, pattern: str) -> list[Listed]:
    """Everything that a pattern matches, by name.

    Args:
        pattern: ``s3://bucket/raw/*.parquet`` (at ``NOETL_MINIO_ENDPOINT`` where it is set, else at AWS),
            ``gs://bucket/...``, or a path; ``*`` matches any text, slashes too in buckets.

    Raises:
        StorageError: the bucket is not there or refuses to be read.
    """
    scheme, bucket, key = split_uri(pattern) if "://" in pattern else ("file", "", pattern)
    if scheme == "file":
        return sorted(_files(key), key=lambda one: one.name)
    prefix = "".join(_until_wild(key.lstrip("/")))
    try:
        listed = _s3(settings, bucket, prefix) if scheme == "s3" else _gcs(settings, bucket, prefix)
        wanted = key.lstrip("/")
        return sorted((one for one in listed if _is_meant(one.name, wanted)), key=lambda one: one.name)
    except StorageError:
        raise
    except Exception as error:  # each client has errors of its own
        raise StorageError(f"{pattern} cannot be listed: {type(error).__name__}: {error}") from error


def _is_meant(name: str, wanted: str) -> bool:
    if not _WILD & set(wanted):  # a folder's name means what is below
        return name == wanted or name.startswith(wanted.rstrip("/") + "/") or not wanted
    return fnmatchcase(name, wanted)


def _until_wild(key: str) -> Iterator[str]:
    for letter in key:
        if letter in _WILD:
            return
        yield letter


def _files(pattern: str) -> Iterator[Listed]:
    path = Path(pattern)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207
    for one in found:
        if one.is_file():
            facts = one.stat()
            yield Listed(
                str(one), facts.st_size, str(facts.st_mtime_ns), datetime.fromtimestamp(facts.st_mtime, UTC)
            )


def _s3(settings: Settings, bucket: str, prefix: str) -> Iterator[Listed]:
    import boto3

    options = {}
    if settings.minio_endpoint is not None:
        options = {
            "endpoint_url": settings.minio_endpoint,
            "aws_access_key_id": settings.minio_access_key,
            "aws_secret_access_key": settings.minio_secret_key.get_secret_value(),
            "aws_session_token": settings.minio_session_token.get_secret_value() or None,
            "region_name": settings.minio_region,
            "verify": None if settings.minio_verify else False,
        }
    pages = boto3.client("s3", **options).get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix):
        for one in page.get("Contents", ()):
            yield Listed(one["Key"], one["Size"], one["ETag"].strip('"'), one["LastModified"])


def _gcs(settings: Settings, bucket: str, prefix: str) -> Iterator[Listed]:
    for blob in shared_client(settings.gcs_endpoint).list_blobs(bucket, prefix=prefix):
        yield Listed(blob.name, blob.size, str(blob.etag), blob.updated)
