"""Converts loaded results to the type of an asset function's annotation."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, get_origin

from noetl_dagster.errors import StorageError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import codec, locations
from noetl_dagster.values import encode_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as SparkFrame


def kind_of_annotation(annotation: Any) -> str:
    """Returns the conversion of an annotation; ``object`` if it needs none."""
    wanted = get_origin(annotation) or annotation
    if not isinstance(wanted, type):
        return "object"
    if wanted in (bytes, str):
        return wanted.__name__
    if issubclass(wanted, PurePath):
        return "path"
    package = wanted.__module__.partition(".")[0]
    names = {
        ("pandas", "DataFrame"): "pandas",
        ("pyarrow", "Table"): "arrow",
        ("polars", "DataFrame"): "polars",
        ("pyspark", "DataFrame"): "spark",
    }
    if wanted.__name__ == "ResultRef":
        return "ref"
    return names.get((package, wanted.__name__), "object")


def convert(value: Any, wanted: str, what: str) -> Any:
    """Returns a fetched value as ``bytes``, ``str``, ``pandas``, ``arrow``, ``polars`` or unchanged (``object``)."""
    if wanted == "object":
        return value
    if wanted == "bytes":
        content_type = codec.TEXT if isinstance(value, str) else None
        return bytes(codec.encode(value, content_type=content_type).data)
    if wanted == "str":
        if isinstance(value, bytes):
            return value.decode()
        return value if isinstance(value, str) else encode_json(value).decode()
    table = _as_table(value)
    if table is None:
        raise StorageError(f"{what} is a {type(value).__name__}, which is no table; annotate the input otherwise")
    if wanted == "pandas":
        return table.to_pandas()
    if wanted == "polars":
        import polars  # type: ignore[import-not-found, unused-ignore]

        return polars.from_arrow(table)
    return table


def _as_table(value: Any) -> Any:
    """Returns an Arrow table of a table or a list of mappings; None for anything else."""
    import pyarrow as pa

    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        columns = dict.fromkeys(name for row in value for name in row)  # not every row has every one
        return pa.table({name: [row.get(name) for row in value] for name in columns})
    return codec.as_arrow_table(value)


def to_path(settings: Settings, ref: ResultRef) -> Path:
    """Returns a path of the stored files: in place if they are files, else a temporary copy of this process."""
    uri = ref.physical_uri
    place = locations.local_path(settings, uri)
    if place is not None:
        return place
    folder = passing_folder()
    if ref.kind is not RefKind.DATASET:
        target = folder / uri.rstrip("/").rpartition("/")[2]
        locations.copy_to_file(settings, uri, target)
        return target
    files = [uri.rstrip("/") + "/" + name for name in ref.extra.get("files", ())]
    for file in files or locations.file_sizes(settings, uri):
        target = folder / file.removeprefix(uri).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        locations.copy_to_file(settings, file, target)
    return folder


def passing_folder() -> Path:
    """Returns a new folder that is removed when the process ends, so that its files stay readable until then."""
    folder = Path(tempfile.mkdtemp(prefix="noetl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def to_spark(settings: Settings, *refs: ResultRef) -> SparkFrame:
    """Returns a Spark frame over the stored Parquet of one value, or of several end to end.

    Files of the shared volume are read in place by driver and executors. Objects of a bucket are first
    copied to this machine: Spark's own S3 client is not part of PySpark, so that only works in local mode.
    """
    from pyspark.sql import SparkSession

    from noetl_dagster.spark.sessions import SparkSessions

    for ref in refs:
        if ref.content_type != codec.PARQUET:
            raise StorageError(f"{ref.physical_uri} is {ref.content_type}; Spark reads Parquet results only")
    session = SparkSession.getActiveSession() or SparkSessions(settings).get()
    for ref in refs:
        if locations.local_path(settings, ref.physical_uri) is None:
            require_local_spark(session, ref.physical_uri)
    return session.read.parquet(*(to_path(settings, ref).as_uri() for ref in refs))


def require_local_spark(session: Any, uri: str) -> None:
    """Raises ``StorageError`` unless driver and executors share this machine's disk."""
    master = session.conf.get("spark.master", "")
    if not master.startswith("local"):
        raise StorageError(
            f"{uri}: Spark on {master} cannot use files of this machine; keep Spark results on the pvc tier"
        )


def parquet_rows(paths: Iterable[Path]) -> int:
    """Returns the number of rows of Parquet files, from their footers."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in paths)
