"""A dataset as chunks, one for each file that Spark has written. No row passes through the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage import codec, locations
from noetl_dagster.tools.base import Chunk, Toolbox, ToolCall


async def resumed_dataset(call: ToolCall, box: Toolbox) -> tuple[ResultRef | None, Sequence[Chunk]]:
    """Returns the dataset that an earlier run of the call has reported, and its chunks in the log.

    Raises:
        ReferenceNotAvailableError: it has expired.
    """
    told = () if box.chunks is None or not box.chunks.wanted(call) else await box.chunks.told(call)
    return (await box.results.find(told[0].position["dataset"]) if told else None), told


async def report_parts(dataset: ResultRef, call: ToolCall, box: Toolbox, told: Sequence[Chunk] = ()) -> None:
    """Reports the files of a dataset, after those in the log, if a step consumes them.

    Only Parquet has chunks; Spark alone reads the other formats.
    """
    chunks = box.chunks
    if chunks is None or not chunks.wanted(call) or dataset.content_type != codec.PARQUET:
        return
    at = {"dataset": dataset.ref}
    if dataset.kind is not RefKind.DATASET:  # of a tier of single objects
        if not told:
            await chunks.tell(call, Chunk(0, dataset, at, more=False))
        return
    sizes = await asyncio.to_thread(_file_sizes, dataset, box)
    files = sorted(sizes)
    for place in range(len(told), len(files)):
        file = files[place]
        part = await box.results.register_part(
            dataset,
            file,
            name=f"{dataset.name}-chunk-{place}",
            bytes_size=sizes[file],
            rows=await asyncio.to_thread(_rows, dataset, file, box),
        )
        more = place < len(files) - 1
        await chunks.tell(call, Chunk(place, part, at, more))


def _file_sizes(dataset: ResultRef, box: Toolbox) -> dict[str, int]:
    from noetl_dagster.spark.datasets import sizes_of_files

    return sizes_of_files(box.settings, dataset.physical_uri)


def _rows(dataset: ResultRef, file: str, box: Toolbox) -> int:
    """Returns the number of rows from the footer of a Parquet file."""
    import pyarrow.parquet as pq

    filesystem, base = locations.arrow_filesystem(box.settings, dataset.physical_uri)
    return int(pq.read_metadata(f"{base.rstrip('/')}/{file}", filesystem=filesystem).num_rows)
