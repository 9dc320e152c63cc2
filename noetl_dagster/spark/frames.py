"""Inputs of a step as DataFrames: references of any tier, files, tables and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from noetl_dagster.errors import StorageError
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.results import FORMAT, VALUE, StoredPart, dump_parts, elements, json_elements
from noetl_dagster.spark.sessions import is_classic
from noetl_dagster.spark.staging import Staging
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.values import encode_json

if TYPE_CHECKING:
    from noetl_dagster.storage.store import ResultStore

IN_PLACE = frozenset({StoreTier.MINIO, StoreTier.S3, StoreTier.GCS, StoreTier.PVC, StoreTier.DISK, StoreTier.OBJECT})
"""Tiers that executors read and write themselves; others hold single small objects, which the driver transfers."""

SPARK_TYPES = "spark_types"
"""Key of ``ResultRef.extra``: its columns have Spark's types, so they can serve as a schema."""

DIGESTS = "sha256"
"""Key of ``ResultRef.extra``: the sha256 of a dataset's files by their names, if known."""


@dataclass(slots=True)
class InputRows:
    """The stored rows of one input, by the way in which they are read.

    Attributes:
        datasets: folders of Parquet files, or of another format on a tier of files.
        tables: single Parquet objects.
        parts: other objects that executors read in place.
        fetched: JSON texts of rows that the driver has fetched.
        fetched_tables: tables that the driver has fetched.
    """

    datasets: list[ResultRef] = field(default_factory=list)
    tables: list[ResultRef] = field(default_factory=list)
    parts: list[StoredPart] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    fetched_tables: list[pa.Table] = field(default_factory=list)

    async def add(self, ref: ResultRef, store: ResultStore, *, depth: int = 1) -> None:
        """Adds the objects and datasets of a reference; fetches only those that executors cannot read."""
        if ref.around is not None:  # one mapping, though its rows are stored in parts
            self.fetched += elements(await store.get_bytes(ref), codec.JSON, depth)
        elif ref.kind is RefKind.MANIFEST:
            async for part in store.parts(ref):
                await self.add(part, store, depth=depth)
        elif ref.kind is RefKind.DATASET:
            self.datasets.append(ref)
        elif ref.store_tier in IN_PLACE and ref.content_type == codec.PARQUET:
            self.tables.append(ref)
        elif ref.store_tier in IN_PLACE:
            self.parts.append(part_of(ref, depth))
        else:
            if ref.content_type == codec.PARQUET:
                self.fetched_tables.append(await store.get(ref))
            else:
                self.fetched += elements(await store.get_bytes(ref), ref.content_type, depth)

    async def add_result(self, envelope: Mapping[str, Any], store: ResultStore) -> None:
        """Adds the result of a step or task; of a loop the rows of each successful iteration."""
        reference = envelope.get("ref")
        if reference is not None:
            ref = ResultRef.model_validate(reference)
            # a loop stores small results of many iterations in one object: a list of lists of rows
            bundled = "total" in envelope and ref.extra.get("strategy") == Strategy.CONCAT
            await self.add(ref, store, depth=2 if bundled else 1)
        elif "total" in envelope:
            for item in envelope.get("results") or ():
                await self.add_result(item, store)
        elif envelope.get("status") == "ok":
            self.fetched += json_elements(envelope.get("data"))


def part_of(ref: ResultRef, depth: int = 1) -> StoredPart:
    """Returns one stored object, as executors read it."""
    return StoredPart(
        ref.physical_uri, ref.content_type, ref.compression, ref.bytes_size, depth=depth, sha256=ref.sha256
    )


def references_in(value: Any) -> list[ResultRef]:
    """Returns the references of a value that is one or a list of them; empty for any other value."""
    if isinstance(value, ResultRef):
        return [value]
    if isinstance(value, Mapping) and "physical_uri" in value and "store_tier" in value:
        return [ResultRef.model_validate(value)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        references = [references_in(item) for item in value]
        if all(references):
            return [ref for refs in references for ref in refs]
    return []


def stored_frame(
    spark: SparkSession,
    settings: Settings,
    rows: InputRows,
    staging: Staging | None = None,
) -> DataFrame:
    """Returns one DataFrame of an input.

    Parquet has its own columns. JSON and text have one text column ``value`` with one element per row.

    Args:
        staging: folder for copies of objects, for the JVM's own readers; it must exist as long as the DataFrame.
            None uses the data source.
    """
    frames = [_dataset_frame(spark, settings, ref, staging) for ref in rows.datasets]
    if rows.tables:
        filesystem, path = locations.arrow_filesystem(settings, rows.tables[0].physical_uri)
        schema = from_arrow_schema(pq.read_schema(path, filesystem=filesystem))
        frames.append(_parts_frame(spark, [part_of(ref) for ref in rows.tables], schema))
    if rows.parts:
        lines = staging.lines(rows.parts) if staging is not None else None
        if lines is None:
            frames.append(_parts_frame(spark, rows.parts))
        else:
            frames.append(spark.read.text(str(lines), lineSep="\n"))
    # with a schema, since Spark would interpret times without a zone as timestamps with one
    frames += [spark.createDataFrame(table, from_arrow_schema(table.schema)) for table in rows.fetched_tables]
    if rows.fetched or not frames:
        frames.append(spark.createDataFrame([(text,) for text in rows.fetched], f"{VALUE} STRING"))
    return reduce(_stacked, frames)


def frame_of(spark: SparkSession, store: ResultStore, execution_id: int, step: str, name: str) -> DataFrame:
    """Returns a result of an execution as a DataFrame, for code outside of the event loop, such as an asset's.

    Args:
        name: of the result: the data frame's in the mapping that a function returned, or the task's.

    Raises:
        ReferenceNotAvailableError: there is none, or it has expired.
    """

    async def find() -> InputRows:
        rows = InputRows()
        await rows.add(await store.find((execution_id, step, name)), store)
        return rows

    return stored_frame(spark, store.settings, run_sync(find()))


def _stacked(above: DataFrame, below: DataFrame) -> DataFrame:
    if set(above.columns) != set(below.columns):
        raise StorageError(
            f"results with the columns {', '.join(above.columns)} and {', '.join(below.columns)} cannot be "
            "one input; give them different names under 'input'"
        )
    return above.unionByName(below)


def _dataset_frame(spark: SparkSession, settings: Settings, ref: ResultRef, staging: Staging | None) -> DataFrame:
    uri, schema = ref.physical_uri, None
    if typed := bool(ref.extra.get(SPARK_TYPES)):
        schema = ", ".join(f"{quoted(name)} {kind}" for name, kind in ref.extra["columns"].items())
    folder = locations.local_path(settings, uri)
    if folder is not None:
        reader = spark.read if schema is None else spark.read.schema(schema)
        form = ref.extra.get("format") or "parquet"
        return reader.format(form).options(**ref.extra.get("options") or {}).load(str(folder))
    if schema is None:
        schema = from_arrow_schema(locations.dataset(settings, uri).schema)
    digests, base = ref.extra.get(DIGESTS) or {}, f"{uri.rstrip('/')}/"
    parts = [
        StoredPart(file, codec.PARQUET, bytes_size=size, base=uri, sha256=digests.get(file.removeprefix(base)))
        for file, size in locations.file_sizes(settings, uri, ".parquet").items()
    ]
    if staging is not None and typed and parts and (copied := staging.files(parts)) is not None:
        # Spark puts partition columns last
        return spark.read.schema(schema).parquet(str(copied)).select(*map(quoted, ref.extra["columns"]))
    return _parts_frame(spark, parts, schema)


def _parts_frame(
    spark: SparkSession,
    parts: list[StoredPart],
    schema: str | StructType = f"{VALUE} STRING",
) -> DataFrame:
    reader = spark.read.format(FORMAT).schema(schema).option("parts", dump_parts(parts))
    # a Connect client does not know how many tasks the cluster runs at once
    tasks = spark.sparkContext.defaultParallelism if is_classic(spark) else 16
    return reader.option("tasks", tasks).load()


def quoted(name: str) -> str:
    """Returns a column's name, quoted for Spark."""
    return f"`{name.replace('`', '``')}`"


def parsed(frame: DataFrame, schema: str | None = None) -> DataFrame:
    """Returns the JSON in column ``value`` as columns: those of ``schema``, else those that a first pass finds."""
    reader = frame.sparkSession.read if schema is None else frame.sparkSession.read.schema(schema)
    return reader.json(frame)


def outside_frame(spark: SparkSession, value: Mapping[str, Any], folder: str) -> DataFrame | None:
    """Returns the DataFrame of ``{table: name}`` or ``{path: ..., format: parquet, options: {}}``; else None.

    Relative paths start at the playbook's folder.
    """
    if set(value) == {"table"}:
        return spark.table(str(value["table"]))
    if "path" in value and set(value) <= {"path", "format", "options", "schema"}:
        address = value["path"]
        paths = [str(path) for path in ([address] if isinstance(address, str) else address)]
        paths = [path if "://" in path else str(Path(folder, path).absolute()) for path in paths]
        form = str(value.get("format") or Path(paths[0]).suffix.lstrip(".") or "parquet")
        reader = spark.read.format(form).options(**(value.get("options") or {}))
        return (reader.schema(value["schema"]) if value.get("schema") else reader).load(paths)
    return None


def row_frame(spark: SparkSession, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Returns rows, for example of a postgres step, as a DataFrame; types are inferred from JSON."""
    texts = [(encode_json(row).decode(),) for row in rows]
    return parsed(spark.createDataFrame(texts, f"{VALUE} STRING"))
