"""DataFrames as results: written in place by the executors, then registered. Nobody sees half of one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import obstore
import orjson
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.frames import SPARK_TYPES
from noetl_dagster.spark.results_source import FORMAT
from noetl_dagster.storage import codec, locations

if TYPE_CHECKING:
    from noetl_dagster.storage.refs import ResultRef
    from noetl_dagster.storage.store import ResultStore

MOST_LISTED_FILES = 100
"""File names that a reference carries; of larger datasets readers list the folder."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a DataFrame is written.

    Attributes:
        format: ``parquet``, or another of Spark's formats on a tier of files.
        tier: None means the shared volume where there is one, else the minio tier.
        partition_by: columns that become folders.
        options: of Spark's writer, for example ``{"compression": "zstd"}``.
    """

    format: str = "parquet"
    tier: StoreTier | None = None
    partition_by: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def tier_for(self, settings: Settings) -> StoreTier:
        if self.tier is not None:
            return self.tier
        return StoreTier.PVC if settings.pvc_mount_path is not None else StoreTier.MINIO


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """A dataset that lies in its folder and is not registered yet. ``bytes_size`` is of all files."""

    uri: str
    columns: dict[str, str]
    rows: int
    bytes_size: int
    files: list[str]


def write_dataset(frame: DataFrame, settings: Settings, uri: str, layout: Layout) -> WrittenDataset:
    """Writes a DataFrame below a fresh folder URI; blocks until Spark is done.

    What a failed job has written is removed.
    """
    # rows are counted as they pass, so that neither a second job nor any footer is needed
    counted = Observation()
    observed = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
    try:
        if locations.local_path(settings, uri) is not None:
            _write_files(observed, settings, uri, layout)
        else:
            _write_objects(observed, uri, layout)
    except BaseException:
        remove_dataset(settings, uri)
        raise
    sizes = _file_sizes(settings, uri)
    return WrittenDataset(
        uri=uri,
        columns={column.name: column.dataType.simpleString() for column in frame.schema},
        rows=int(counted.get["rows"]),
        bytes_size=sum(sizes.values()),
        files=sorted(sizes),
    )


async def register(
    written: WrittenDataset, store: ResultStore, layout: Layout, *, execution_id: int, step: str, name: str
) -> ResultRef:
    """Publishes a written dataset as a result."""
    listed = written.files if len(written.files) <= MOST_LISTED_FILES else []
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
        },
    )


def _write_files(frame: DataFrame, settings: Settings, uri: str, layout: Layout) -> None:
    folder = locations.local_path(settings, uri)
    writer = frame.write.format(layout.format).mode("error").options(**layout.options)
    if layout.partition_by:
        writer = writer.partitionBy(*layout.partition_by)
    writer.save(str(folder))


def _write_objects(frame: DataFrame, uri: str, layout: Layout) -> None:
    if layout.format != "parquet":
        raise ValueError(
            f"format {layout.format} is written to the pvc and disk tiers; object tiers take parquet"
        )
    if layout.partition_by:  # a task then has one file open at a time
        frame = frame.sortWithinPartitions(*layout.partition_by)
    writer = frame.write.format(FORMAT).mode("append").option("path", uri)
    writer.option("partition_by", orjson.dumps(layout.partition_by).decode()).save()


def _file_sizes(settings: Settings, uri: str) -> dict[str, int]:
    """Bytes of each data file, by its name below the folder."""
    folder = locations.local_path(settings, uri)
    if folder is not None:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] not in "_."]
        return {str(path.relative_to(folder)): path.stat().st_size for path in files}
    prefix = locations.object_key(uri).rstrip("/") + "/"
    pages = obstore.list(locations.object_store(settings, uri), prefix=prefix)
    return {entry["path"].removeprefix(prefix): entry["size"] for page in pages for entry in page}


def remove_dataset(settings: Settings, uri: str) -> None:
    """Removes whatever lies below a dataset's folder."""
    folder = locations.local_path(settings, uri)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    store = locations.object_store(settings, uri)
    prefix = locations.object_key(uri).rstrip("/") + "/"
    for page in obstore.list(store, prefix=prefix):
        obstore.delete(store, [entry["path"] for entry in page])
