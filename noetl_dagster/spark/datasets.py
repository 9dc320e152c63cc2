"""DataFrames as results: executors write them in place, and they are registered once they are complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention
from pyspark.sql.types import StringType, StructType

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.frames import DIGESTS, IN_PLACE, SPARK_TYPES, quoted
from noetl_dagster.spark.results import FORMAT
from noetl_dagster.spark.staging import EMPTY, Staging
from noetl_dagster.storage import codec, locations

if TYPE_CHECKING:
    from noetl_dagster.result_ref import ResultRef
    from noetl_dagster.storage.store import ResultStore

FILES = frozenset({StoreTier.PVC, StoreTier.DISK, StoreTier.OBJECT})
"""Tiers that Spark's own writers write, in any of their formats."""

MOST_LISTED_FILES = 100  # in a reference; for larger datasets readers list the folder

_TIMESTAMP_TYPE = "spark.sql.parquet.outputTimestampType"
_NOT_PLAIN = ("void", "interval", "variant", "time(")


@dataclass(frozen=True, slots=True)
class Layout:
    """The options for writing a DataFrame.

    Attributes:
        format: ``parquet``, or another of Spark's formats on a tier of files.
        tier: None means the shared volume if there is one, else the minio tier.
        partition_by: columns that become folders.
        options: of Spark's writer, for example ``{"compression": "zstd"}``.
    """

    format: str = "parquet"
    tier: StoreTier | None = None
    partition_by: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def tier_for(self, settings: Settings) -> StoreTier:
        """Returns the tier that these settings lead to."""
        if self.tier is not None:
            return self.tier
        return StoreTier.PVC if settings.pvc_mount_path is not None else StoreTier.MINIO

    def check(self) -> None:
        """Raises ``ValueError`` if the tier does not support the format or partitioning."""
        if self.tier is None or self.tier in FILES:
            return
        if self.format != "parquet":
            raise ValueError(f"tier {self.tier.value} takes parquet; {self.format} is written to pvc and disk")
        if self.partition_by and self.tier not in IN_PLACE:
            raise ValueError(f"tier {self.tier.value} holds single objects, which have no partition_by")


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """A dataset in its folder that is not registered yet."""

    uri: str
    columns: dict[str, str]
    rows: int
    bytes_size: int
    files: list[str]
    digests: dict[str, str] = field(default_factory=dict)


def write_dataset(
    frame: DataFrame, settings: Settings, uri: str, layout: Layout, staging: Staging | None = None
) -> WrittenDataset:
    """Writes a DataFrame below a new folder URI; blocks until Spark is done. Removes the files of a failed job.

    Args:
        staging: folder for the JVM's files, which are then copied to a bucket; None uses the data source.
    """
    # rows are counted as they pass, so that neither a second job nor any footer is needed
    counted = Observation()
    observed = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
    digests: dict[str, str] = {}
    try:
        if (folder := locations.local_path(settings, uri)) is not None:
            _write_files(observed, folder, layout)
        elif layout.format != "parquet":
            raise ValueError(f"format {layout.format} is written to the pvc and disk tiers; object tiers take parquet")
        elif staging is not None and _has_plain_types(frame.schema):
            staged = _write_staged(observed, staging, layout)
            if int(counted.get["rows"]):  # the data source makes no file without rows
                digests = staging.publish(staged, uri)
        else:
            if layout.partition_by:  # a task then has one file open at a time
                observed = observed.sortWithinPartitions(*layout.partition_by)
            writer = observed.write.format(FORMAT).mode("append").option("path", uri)
            writer.option("partition_by", orjson.dumps(layout.partition_by).decode()).save()
    except BaseException:
        locations.remove_below(settings, uri)
        raise
    sizes = sizes_of_files(settings, uri)
    rows = int(counted.get["rows"])
    if rows and not sizes:  # each executor has written to its own disk
        locations.remove_below(settings, uri)
        raise StorageError(
            f"Spark wrote {rows} rows to {uri}, but no file is there; mount the volume in executors at the same "
            "path, or choose a tier of objects"
        )
    return WrittenDataset(
        uri=uri,
        columns={column.name: column.dataType.simpleString() for column in frame.schema},
        rows=rows,
        bytes_size=sum(sizes.values()),
        files=sorted(sizes),
        digests=digests,
    )


async def register(
    written: WrittenDataset, store: ResultStore, layout: Layout, *, execution_id: int, step: str, name: str
) -> ResultRef:
    """Publishes a written dataset as a result."""
    listed = written.files if len(written.files) <= MOST_LISTED_FILES else []
    digests = {DIGESTS: written.digests} if listed and written.digests else {}
    return await store.register_dataset(
        written.uri,
        execution_id=execution_id,
        step=step,
        name=name,
        files=listed,
        rows=written.rows,
        schema=written.columns,
        bytes_size=written.bytes_size,
        content_type=codec.PARQUET if layout.format == "parquet" else f"application/x-{layout.format}",
        extra={
            SPARK_TYPES: True,
            "file_count": len(written.files),
            "partition_by": list(layout.partition_by),
            "format": layout.format,
            "options": layout.options,
            **digests,
        },
    )


def _write_files(frame: DataFrame, folder: Path, layout: Layout) -> None:
    writer = frame.write.format(layout.format).mode("error").options(**layout.options)
    if layout.partition_by:
        writer = writer.partitionBy(*layout.partition_by)
    writer.save(str(folder))


def _write_staged(frame: DataFrame, staging: Staging, layout: Layout) -> Path:
    """Writes files as the data source would: timestamps in microseconds, empty texts preserved in folder names."""
    session = frame.sparkSession
    if session.conf.get(_TIMESTAMP_TYPE) == "INT96":  # Spark's default, which Parquet has deprecated
        session.conf.set(_TIMESTAMP_TYPE, "TIMESTAMP_MICROS")
    for item in frame.schema.fields:
        if item.name in layout.partition_by and isinstance(item.dataType, StringType):
            column = F.col(quoted(item.name))
            frame = frame.withColumn(item.name, F.when(column == "", EMPTY).otherwise(column))
    folder = staging.new_folder() / "dataset"
    _write_files(frame, folder, layout)
    return folder


def _has_plain_types(schema: StructType) -> bool:
    """Reports whether the JVM writes these types to Parquet as the data source would."""
    names = [name.lower() for name in schema.names]
    return len(set(names)) == len(names) and not any(kind in schema.simpleString() for kind in _NOT_PLAIN)


def sizes_of_files(settings: Settings, uri: str) -> dict[str, int]:
    """Returns the bytes of each data file, by its name below the folder."""
    folder = locations.local_path(settings, uri)
    if folder is not None:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] not in "_."]
        return {str(path.relative_to(folder)): path.stat().st_size for path in files}
    base = uri.rstrip("/") + "/"
    return {file.removeprefix(base): size for file, size in locations.file_sizes(settings, base).items()}
