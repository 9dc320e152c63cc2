"""What a step gives to Spark as DataFrames: references of any tier, files, tables and rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.results_source import FORMAT, VALUE, StoredPart, dump_parts, elements
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.refs import RefKind, ResultRef

if TYPE_CHECKING:
    from noetl_dagster.storage.store import ResultStore

IN_PLACE = frozenset({StoreTier.MINIO, StoreTier.S3, StoreTier.PVC, StoreTier.DISK, StoreTier.OBJECT})
"""Tiers that executors read themselves; results of the others are small and are fetched by the driver."""

SPARK_TYPES = "spark_types"
"""Key of ``ResultRef.extra``: its columns are named with Spark's types, so they can be used as a schema."""


@dataclass(slots=True)
class StoredRows:
    """References behind one input, by how they are read.

    Attributes:
        datasets: folders of Parquet files.
        parts: objects that executors read in place.
        fetched: JSON texts of the elements of results that the driver has fetched.
    """

    datasets: list[ResultRef] = field(default_factory=list)
    parts: list[ResultRef] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)


def references_in(value: Any) -> list[ResultRef]:
    """The references that a value is, or is a list or envelope of; empty for any other value.

    Items of a list that failed have no result and are left out.
    """
    if isinstance(value, ResultRef):
        return [value]
    if isinstance(value, Mapping):
        if "physical_uri" in value and "store_tier" in value:
            return [ResultRef.model_validate(value)]
        inner = value.get("ref") or (value.get("results") if "total" in value else None)
        return references_in(inner) if not isinstance(inner, str) else []
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found = [(item, references_in(item)) for item in value]
        if all(refs or _is_failure(item) for item, refs in found):
            return [ref for _, refs in found for ref in refs]
    return []


def _is_failure(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("status") == "error"


async def resolve(refs: Iterable[ResultRef], store: ResultStore) -> StoredRows:
    """Follows manifests down to objects and datasets; fetches nothing that executors can read."""
    rows = StoredRows()
    for ref in refs:
        if ref.kind is RefKind.MANIFEST:
            async for part in store.parts(ref):
                deeper = await resolve([part], store)
                rows.datasets += deeper.datasets
                rows.parts += deeper.parts
                rows.fetched += deeper.fetched
        elif ref.kind is RefKind.DATASET:
            rows.datasets.append(ref)
        elif ref.store_tier in IN_PLACE:
            rows.parts.append(ref)
        else:
            rows.fetched += elements(await store.get_bytes(ref), ref.content_type)
    return rows


def stored_frame(spark: SparkSession, settings: Settings, rows: StoredRows) -> DataFrame:
    """One DataFrame of everything behind an input.

    Parquet gives its columns. JSON and text give one text column ``value`` with an element a row.
    """
    frames = [_dataset_frame(spark, settings, ref) for ref in rows.datasets]
    tables = [ref for ref in rows.parts if ref.content_type == codec.PARQUET]
    texts = [_part(ref) for ref in rows.parts if ref.content_type != codec.PARQUET]
    if tables:
        frames.append(_table_frame(spark, settings, tables))
    if texts:
        frames.append(_parts_frame(spark, texts))
    if rows.fetched or not frames:
        frames.append(spark.createDataFrame([(text,) for text in rows.fetched], f"{VALUE} STRING"))
    return reduce(_stacked, frames)


def _stacked(above: DataFrame, below: DataFrame) -> DataFrame:
    if set(above.columns) != set(below.columns):
        raise StorageError(
            f"results with the columns {', '.join(above.columns)} and {', '.join(below.columns)} cannot be "
            "one input; give them different names under 'input'"
        )
    return above.unionByName(below)


def _part(ref: ResultRef) -> StoredPart:
    return StoredPart(ref.physical_uri, ref.content_type, ref.compression, ref.bytes_size)


def _table_frame(spark: SparkSession, settings: Settings, refs: list[ResultRef]) -> DataFrame:
    import pyarrow.parquet as pq

    filesystem, path = locations.arrow_filesystem(settings, refs[0].physical_uri)
    schema = from_arrow_schema(pq.read_schema(path, filesystem=filesystem))
    return _parts_frame(spark, [_part(ref) for ref in refs], schema)


def _dataset_frame(spark: SparkSession, settings: Settings, ref: ResultRef) -> DataFrame:
    typed = bool(ref.extra.get(SPARK_TYPES))
    folder = locations.local_path(settings, ref.physical_uri)
    if folder is not None:
        reader = spark.read.schema(ddl(ref.extra["columns"])) if typed else spark.read
        return reader.parquet(str(folder))
    files = locations.list_files(settings, ref.physical_uri, ".parquet")
    schema: str | StructType = (
        ddl(ref.extra["columns"])
        if typed
        else from_arrow_schema(locations.dataset(settings, ref.physical_uri).schema)
    )
    parts = [StoredPart(uri, codec.PARQUET, base=ref.physical_uri) for uri in files]
    return _parts_frame(spark, parts, schema)


def _parts_frame(
    spark: SparkSession, parts: list[StoredPart], schema: str | StructType = f"{VALUE} STRING"
) -> DataFrame:
    reader = spark.read.format(FORMAT).schema(schema).option("parts", dump_parts(parts))
    return reader.option("tasks", _parallelism(spark)).load()


def _parallelism(spark: SparkSession) -> int:
    """Tasks that the cluster runs at once; a Connect client cannot ask."""
    return spark.sparkContext.defaultParallelism if hasattr(spark, "_jsparkSession") else 16


def ddl(columns: Mapping[str, str]) -> str:
    """Columns and their types as Spark writes a schema."""
    return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in columns.items())


def parsed(frame: DataFrame, schema: str | None = None) -> DataFrame:
    """The JSON in column ``value`` as columns: of ``schema``, else of what a first pass finds."""
    reader = frame.sparkSession.read if schema is None else frame.sparkSession.read.schema(schema)
    return reader.json(frame)


def outside_frame(spark: SparkSession, value: Mapping[str, Any], folder: str) -> DataFrame | None:
    """``{table: name}`` or ``{path: ..., format: parquet, options: {}}`` as a DataFrame; else None.

    Relative paths start at the playbook's folder.
    """
    if set(value) == {"table"}:
        return spark.table(str(value["table"]))
    if "path" in value and set(value) <= {"path", "format", "options", "schema"}:
        given = value["path"]
        paths = [_located(str(path), folder) for path in ([given] if isinstance(given, str) else given)]
        form = str(value.get("format") or Path(paths[0]).suffix.lstrip(".") or "parquet")
        reader = spark.read.format(form).options(**(value.get("options") or {}))
        return (reader.schema(value["schema"]) if value.get("schema") else reader).load(paths)
    return None


def _located(path: str, folder: str) -> str:
    return path if "://" in path else str((Path(folder) / path).absolute())


def row_frame(spark: SparkSession, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Rows of a result, for example of a postgres step, as a DataFrame; JSON decides the types."""
    texts = [(codec.dump_json(row).decode(),) for row in rows]
    return parsed(spark.createDataFrame(texts, f"{VALUE} STRING"))
