"""Results as tables that DuckDB reads where they lie, and object storage as it sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import duckdb
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from obstore.fsspec import FsspecStore

from noetl_dagster.errors import NoetlError
from noetl_dagster.playbook.templates.sql_filters import sql_literal
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from noetl_dagster.storage.codec import dump_json
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.tools.references import as_result_ref
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable
from noetl_dagster.tools.sql.large.spool import Files, laid_down

if TYPE_CHECKING:
    from noetl_dagster.storage.store import ResultStore

PARQUET = "application/vnd.apache.parquet"

Source: TypeAlias = ResultRef | pa.Table | Files
"""What a view is made of: Parquet that is read in place, a table in memory, or files that were laid down."""


class NoRowsError(NoetlError):
    """A value holds no rows."""


async def source_of(value: Any, results: ResultStore, name: str, folder: Path) -> Source | None:
    """What a view of a value is made of; None for a value that is neither rows, alone or under ``rows``, nor a
    reference.

    Args:
        folder: where many stored rows are laid down; the source lasts as long as it.

    Raises:
        NoRowsError: a reference leads to something without rows.
    """
    reference = as_result_ref(value)
    if reference is not None:
        ref = reference if isinstance(reference, ResultRef) else await results.find(reference)
        if _in_place(ref):
            return ref
        if strategy_of(ref) not in (Strategy.CONCAT, Strategy.ROWS) or ref.kind is not RefKind.MANIFEST:
            return _table(await results.get(ref), name)
        files = await laid_down(results, ref.rows_alone, folder, lambda rows: _table(rows, name))
        if files is None:
            raise NoRowsError(f"input {name!r} has no rows: a list of mappings is needed")
        return files
    rows = value.get("rows") if isinstance(value, Mapping) else value
    return _table(rows, name) if isinstance(rows, pa.Table) or _is_rows(rows) else None


def _in_place(ref: ResultRef) -> bool:
    files = ref.physical_uri.startswith(("/", "file://", "s3://", "gs://"))
    return (
        files
        and ref.content_type == PARQUET
        and ref.compression == "none"
        and ref.kind is not RefKind.MANIFEST
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(value: Any, name: str) -> pa.Table:
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, Mapping) and _is_rows(value.get("rows")):
        value = value["rows"]
    if not _is_rows(value):
        raise NoRowsError(f"input {name!r} has no rows: a list of mappings is needed")
    try:
        rows = [to_jsonable(row, name) for row in value]
    except NotJsonableError as error:
        raise NoRowsError(str(error)) from error
    columns = dict.fromkeys(column for row in rows for column in row)
    return pa.table({column: _column([row.get(column) for row in rows]) for column in columns})


def _column(values: list[Any]) -> pa.Array:
    """One column; values of several types, or beyond 64 bits, as text."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        texts = (
            value if value is None or isinstance(value, str) else dump_json(value).decode()
            for value in values
        )
        return pa.array(list(texts), pa.string())


class _GoogleFiles(ArrowFSWrapper):
    """Arrow's file system of Google's storage, by the name that URIs have."""

    protocol = "gs"


class _Buckets(FsspecStore):  # type: ignore[misc]
    """obstore's file system, which finds patterns with their protocol too: DuckDB asks so."""

    async def _glob(self, path: str, **options: Any) -> Any:
        return await super()._glob(path.removeprefix(f"{self.protocol}://"), **options)


def mount_object_storage(connection: duckdb.DuckDBPyConnection, settings: Settings) -> None:
    """Makes ``s3://`` and ``gs://`` paths readable and writable without DuckDB's httpfs, which needs a download."""
    if settings.gcs_bucket is not None:
        filesystem, _ = locations.arrow_filesystem(settings, f"gs://{settings.gcs_bucket}/")
        connection.register_filesystem(_GoogleFiles(filesystem))
    if settings.minio_endpoint is None:
        return
    token = settings.minio_session_token.get_secret_value()
    store = _Buckets(
        "s3",
        config={
            "endpoint": settings.minio_endpoint,
            "access_key_id": settings.minio_access_key,
            "secret_access_key": settings.minio_secret_key.get_secret_value(),
            "region": settings.minio_region,
            "virtual_hosted_style_request": False,
            **({"session_token": token} if token else {}),
        },
        client_options={
            "allow_http": settings.minio_endpoint.startswith("http://"),
            "allow_invalid_certificates": not settings.minio_verify,
        },
    )
    connection.register_filesystem(store)


def create_view(connection: duckdb.DuckDBPyConnection, settings: Settings, name: str, source: Source) -> None:
    """Makes a view of that name.

    Raises:
        NoetlError: the files of a reference are not there.
    """
    quoted = '"' + name.replace('"', '""') + '"'
    if isinstance(source, Files):
        connection.execute(f"CREATE TEMP VIEW {quoted} AS {source.select}")
        return
    if not isinstance(source, ResultRef):
        connection.register(name, source)
        return
    uris = _files(settings, source)
    scheme, bucket, _ = locations.split_uri(source.physical_uri)
    # credentials of the AWS or the Google environment, which Arrow finds
    if scheme == "gs" or (scheme == "s3" and bucket != settings.minio_bucket):
        connection.register(name, _arrow_dataset(settings, uris))
        return
    paths = [str(locations.local_path(settings, uri) or uri) for uri in uris]
    listed = ", ".join(map(sql_literal, paths))
    connection.execute(f"CREATE TEMP VIEW {quoted} AS SELECT * FROM read_parquet([{listed}])")


def _files(settings: Settings, ref: ResultRef) -> list[str]:
    """URIs of the Parquet files of a dataset, or of the one object."""
    if ref.kind is not RefKind.DATASET:
        return [ref.physical_uri]
    names = ref.extra.get("files") or ()
    folder = ref.physical_uri.rstrip("/")
    found = [f"{folder}/{name}" for name in names] or locations.list_files(settings, folder, ".parquet")
    if not found:
        raise NoRowsError(f"no Parquet files are below {folder}")
    return found


def _arrow_dataset(settings: Settings, uris: Sequence[str]) -> Any:
    from pyarrow import dataset as arrow_dataset

    filesystem, _ = locations.arrow_filesystem(settings, uris[0])
    paths = [locations.arrow_filesystem_path(settings, uri) for uri in uris]
    return arrow_dataset.dataset(paths, format="parquet", filesystem=filesystem)
