"""Synchronous, picklable functions that read and write stored results by URI, without an event loop.

Spark executors, DuckDB and IO managers use them: they have settings and a URI but no store object. Forms:
``s3://bucket/key`` (minio and s3), ``gs://bucket/key``, ``file:///path`` or an absolute path (pvc and disk),
``kv://bucket/key``, ``db://result_blob/key``, ``duckdb://file/key``, and ``data:`` (eventlog).

Files are read in place by path. Objects are read

- by DuckDB through obstore's fsspec interface: its own S3 reader is an extension that is downloaded on first use, which
  closed networks do not allow;
- by Spark through the data source ``noetl_results``, which uses the functions below: PySpark ships without Hadoop's S3
  client;
- by Arrow with the endpoint overridden (:func:`dataset`).
"""

from __future__ import annotations

import glob
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg

from noetl_dagster.errors import IntegrityError, ReferenceNotAvailableError, StorageError
from noetl_dagster.events.connection import connect
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers import open_tier
from noetl_dagster.storage.tiers.base import StoredObject
from noetl_dagster.storage.tiers.files import below, path_of_uri
from noetl_dagster.storage.tiers.gcs import GcsBucket
from noetl_dagster.storage.tiers.objects import S3Bucket, aws_endpoint, minio_store, s3_store

if TYPE_CHECKING:
    from pyarrow import dataset as arrow_dataset
    from pyarrow import fs as arrow_fs

_TIERS = {
    "gs": StoreTier.GCS,
    "kv": StoreTier.KV,
    "db": StoreTier.DB,
    "duckdb": StoreTier.DUCKDB,
    "memory": StoreTier.MEMORY,
    "data": StoreTier.EVENTLOG,
}


_ARROW_NAMES = {
    "bigint": "int64",
    "int": "int32",
    "smallint": "int16",
    "tinyint": "int8",
    "boolean": "bool",
    "date": "date32",
}
"""Arrow's names of the types that partition columns have, by Spark's names."""

_COPIED = 4 * 1024 * 1024
"""Bytes that are copied at once."""

_WILD = re.compile(r"[*?[]")


def split_uri(uri: str) -> tuple[str, str, str]:
    """Returns the scheme, bucket (empty for files) and key or path of a URI."""
    if uri.startswith("/"):
        return "file", "", uri
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return "file", "", str(path_of_uri(uri))
    return parts.scheme, parts.netloc, uri.removeprefix(f"{parts.scheme}://{parts.netloc}").lstrip("/")


def mounts(settings: Settings) -> list[Path]:
    """Returns the folders that hold results as files: the shared volume and the disk tier."""
    disk = (settings.home / "results").absolute()
    return [disk] if settings.pvc_mount_path is None else [settings.pvc_mount_path.absolute(), disk]


def local_path(settings: Settings, uri: str) -> Path | None:
    """Returns the file or folder of a pvc or disk URI, for engines that read in place; None for other tiers.

    Raises ``StorageError`` for paths outside the mounts.
    """
    scheme, _, path = split_uri(uri)
    if scheme != "file":
        return None
    for mount in mounts(settings):
        if (file := below(mount, Path(path))) is not None:
            return file
    raise StorageError(f"{path} is below no mount of results ({', '.join(map(str, mounts(settings)))})")


def bucket_of(settings: Settings, uri: str) -> S3Bucket | GcsBucket:
    """Returns the bucket of an ``s3://`` or ``gs://`` URI; its keys are those of :func:`object_key`."""
    scheme, bucket, _ = split_uri(uri)
    if scheme == "gs":
        return GcsBucket(settings, bucket)
    if scheme == "s3":
        return S3Bucket((minio_store if bucket == settings.minio_bucket else s3_store)(settings, bucket))
    raise StorageError(f"{uri[:200]}: no object store for {scheme}://; expected s3:// or gs://")


def object_key(uri: str) -> str:
    """Returns the key of a URI inside its bucket; for a file, its path below ``/``."""
    return split_uri(uri)[2].lstrip("/")


def tier_of_uri(uri: str, settings: Settings) -> StoreTier:
    """Returns the tier whose bucket, folder or table a URI is in; raises ``StorageError`` if there is none."""
    scheme, bucket, path = split_uri(uri)
    if scheme == "s3":
        return StoreTier.MINIO if bucket == settings.minio_bucket else StoreTier.S3
    if scheme == "file":
        volume = settings.pvc_mount_path
        return StoreTier.DISK if volume is None or below(volume, Path(path)) is None else StoreTier.PVC
    if scheme in _TIERS:
        return _TIERS[scheme]
    raise StorageError(f"{uri[:200]} is in no tier; expected s3://, gs://, file:///, kv:// or db://")


def read_bytes(settings: Settings, uri: str) -> bytes:
    """Returns the stored bytes at a URI of any tier that other processes can read, unverified."""
    try:
        path = local_path(settings, uri)
        if path is not None:
            return path.read_bytes()
        if uri.startswith(("s3://", "gs://")):
            return bucket_of(settings, uri).read(object_key(uri))
        return run_sync(_read_from_tier(settings, uri))
    except (FileNotFoundError, KeyError) as error:
        raise _not_there(uri) from error


async def _read_from_tier(settings: Settings, uri: str) -> bytes:
    tier_name, pool = tier_of_uri(uri, settings), None
    if tier_name is StoreTier.DB:
        pool = await asyncpg.create_pool(settings.db_url, min_size=1, max_size=1, connect=connect)
    tier = open_tier(tier_name, settings, pool)
    try:
        return bytes(await tier.get(uri))
    finally:
        await tier.close()
        if pool is not None:
            await pool.close()


def copy_to_file(settings: Settings, uri: str, path: Path, *, sha256: str | None = None) -> None:
    """Copies the bytes at a URI to a file, in constant memory, and compares their ``sha256`` if it is given.

    Raises:
        ReferenceNotAvailableError: nothing is stored there.
        IntegrityError: the bytes differ from those that were stored.
    """
    digest = hashlib.sha256()
    try:
        local = local_path(settings, uri)
        reader = local.open("rb") if local is not None else bucket_of(settings, uri).open(object_key(uri))
        with closing(reader) as source, path.open("wb") as target:
            while chunk := source.read(_COPIED):
                digest.update(chunk)
                target.write(chunk)
    except FileNotFoundError as error:
        raise _not_there(uri) from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise damaged(uri, digest.hexdigest(), sha256)


def copy_from_file(settings: Settings, path: Path, uri: str) -> str:
    """Stores a file at a URI of a bucket, in constant memory. Returns the sha256 of the bytes that were sent."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        bucket_of(settings, uri).write(object_key(uri), file, path.stat().st_size)
    return digest


def damaged(uri: str, digest: str, stored_as: str, name: str = "") -> IntegrityError:
    """Returns the error for bytes that differ from those that were stored, with the name of their result."""
    return IntegrityError(
        f"{name}{': ' if name else ''}the bytes at {uri[:200]} were changed or damaged (sha256 {digest}, stored as "
        f"{stored_as}); run the step again"
    )


def _not_there(uri: str) -> ReferenceNotAvailableError:
    return ReferenceNotAvailableError(f"nothing is at {uri[:200]}; it expired or was deleted")


def file_sizes(settings: Settings, uri: str, suffix: str = "") -> dict[str, int]:
    """Returns the bytes of all files below a folder URI by their URIs, in order, without markers such as ``.crc``."""
    folder = local_path(settings, uri)
    if folder is not None:
        files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
        sizes = [(path.as_uri(), path.name, path.stat().st_size) for path in files]
    else:
        scheme, bucket, key = split_uri(uri)
        sizes = [
            (f"{scheme}://{bucket}/{name}", name.rpartition("/")[2], size)
            for name, size in bucket_of(settings, uri).sizes(key).items()
        ]
    return {uri: size for uri, name, size in sorted(sizes) if not name.startswith(("_", ".")) and name.endswith(suffix)}


def remove_below(settings: Settings, uri: str) -> None:
    """Removes all files or objects below a folder URI."""
    folder = local_path(settings, uri)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    bucket = bucket_of(settings, uri)
    bucket.delete(list(bucket.sizes(object_key(uri).rstrip("/") + "/")))


def remove_objects(settings: Settings, uris: Sequence[str]) -> None:
    """Removes objects of one bucket. Arrow would leave an empty one in place of their folder."""
    if uris:
        bucket_of(settings, uris[0]).delete([object_key(uri) for uri in uris])


def arrow_filesystem(settings: Settings, uri: str) -> tuple[arrow_fs.FileSystem, str]:
    """Returns Arrow's own file system for a URI, and the path in it."""
    from pyarrow import fs

    scheme, bucket, _ = split_uri(uri)
    match scheme:
        case "file":
            filesystem = fs.LocalFileSystem()
        case "gs" if not settings.gcs_endpoint:
            filesystem = fs.GcsFileSystem()
        case "gs":
            filesystem = fs.GcsFileSystem(anonymous=True, **_endpoint(settings.gcs_endpoint))
        case "s3" if bucket == settings.minio_bucket:
            if (settings.minio_endpoint or "").startswith("https://") and not settings.minio_verify:
                raise StorageError(
                    f"Arrow reads nothing of {settings.minio_endpoint} without checking its certificate; add the "
                    "authority to the system's, and leave verify (NOETL_MINIO_VERIFY) as it is"
                )
            filesystem = fs.S3FileSystem(
                session_token=settings.minio_session_token.get_secret_value() or None,
                access_key=settings.minio_access_key,
                secret_key=settings.minio_secret_key.get_secret_value(),
                region=settings.minio_region,
                **_endpoint(settings.minio_endpoint),
            )
        case "s3":  # Arrow takes keys and region from the AWS environment, but not the endpoint
            filesystem = fs.S3FileSystem(**_endpoint(aws_endpoint()))
        case _:
            raise StorageError(f"{uri[:200]}: Arrow reads s3://, gs:// and file:/// in place; use ResultStore.get")
    return filesystem, arrow_filesystem_path(settings, uri)


def arrow_filesystem_path(settings: Settings, uri: str) -> str:
    """Returns the path of a URI for Arrow's file systems: ``bucket/key`` or an absolute path."""
    path = local_path(settings, uri)
    if path is not None:
        return str(path)
    _, bucket, key = split_uri(uri)
    return f"{bucket}/{key}"


def _endpoint(url: str | None) -> dict[str, str]:
    """Returns the arguments of Arrow's file systems for the address of a store; none for its provider's own."""
    scheme, _, address = (url or "").partition("://")
    return {"scheme": scheme, "endpoint_override": address} if address else {}


def dataset(
    settings: Settings,
    uri: str,
    files: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> arrow_dataset.Dataset:
    """Opens a Parquet dataset in place; it is read lazily, with its folders ``name=value`` as columns.

    Args:
        files: names below the URI; empty finds them.
        columns: types by name, Spark's or Arrow's. Without them a folder ``part=007`` is the number 7.
    """
    from pyarrow import dataset as arrow_dataset

    names = [uri.rstrip("/") + "/" + name for name in files or ()] or list(file_sizes(settings, uri, ".parquet"))
    if not names:
        raise ReferenceNotAvailableError(f"no Parquet files are below {uri}")
    filesystem, base = arrow_filesystem(settings, uri)
    paths = [arrow_filesystem_path(settings, name) for name in names]
    return arrow_dataset.dataset(
        paths,
        format="parquet",
        filesystem=filesystem,
        partitioning=_hive_partitioning(names[0].removeprefix(uri.rstrip("/")), columns or {}),
        partition_base_dir=base.rstrip("/"),
    )


def _hive_partitioning(file: str, columns: Mapping[str, str]) -> Any:
    """Returns the partitioning of a dataset's folders; unknown types are inferred."""
    import pyarrow as pa
    from pyarrow import dataset as arrow_dataset

    names = [folder.partition("=")[0] for folder in file.split("/")[:-1] if "=" in folder]
    try:
        types = [(name, pa.type_for_alias(_ARROW_NAMES.get(columns[name], columns[name]))) for name in names]
    except (KeyError, ValueError):
        types = []
    return arrow_dataset.partitioning(pa.schema(types) if types else None, flavor="hive")


def matching(settings: Settings, pattern: str) -> list[StoredObject]:
    """Returns everything that a pattern matches, sorted by key: objects, or files by their path and time.

    Args:
        pattern: ``s3://bucket/raw/*.parquet`` (at ``NOETL_MINIO_ENDPOINT`` where it is set, else at AWS),
            ``gs://bucket/...``, or a path; ``*`` matches any text, slashes too in buckets.

    Raises:
        StorageError: the bucket is missing or refuses to be read.
    """
    scheme, bucket, key = split_uri(pattern) if "://" in pattern else ("file", "", pattern)
    if scheme == "file":
        return sorted(_files(key), key=lambda file: file.key)
    wanted = key.lstrip("/")
    prefix = _WILD.split(wanted, maxsplit=1)[0]
    try:
        store = minio_store if settings.minio_endpoint else s3_store
        objects = GcsBucket(settings, bucket) if scheme == "gs" else S3Bucket(store(settings, bucket))
        listed = list(chain.from_iterable(objects.objects(prefix)))
    except StorageError:
        raise
    except Exception as error:  # each client has errors of its own
        raise StorageError(f"{pattern} cannot be listed: {type(error).__name__}: {error}") from error
    if _WILD.search(wanted):
        listed = [entry for entry in listed if fnmatchcase(entry.key, wanted)]
    elif wanted:  # a folder's name means everything below
        listed = [entry for entry in listed if f"{entry.key}/".startswith(wanted.rstrip("/") + "/")]
    return sorted(listed, key=lambda entry: entry.key)


def _files(pattern: str) -> Iterator[StoredObject]:
    path = Path(pattern)
    paths = path.rglob("*") if path.is_dir() else map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207
    for file in paths:
        if file.is_file():
            facts = file.stat()
            modified = datetime.fromtimestamp(facts.st_mtime, UTC)
            yield StoredObject(str(file), facts.st_size, str(facts.st_mtime_ns), modified)
