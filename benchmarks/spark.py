"""What the spark tool costs: the patient flow's normalisation in plain PySpark, and through the tool.

    python -m benchmarks.spark --patients 2000

Both read the same raw pages of the minio tier and write the same Parquet. Plain PySpark gets the pages from
a local copy, its best case. Prints seconds of each (best of ``--repeats``) and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from pyspark.sql import SparkSession

from noetl_dagster import embedded
from noetl_dagster.playbook.models import Task
from noetl_dagster.records_api import DataType, RecordBook
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.functions import load_function
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.refs import ResultRef
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.clients import Clients
from noetl_dagster.tools.credentials import Credentials
from noetl_dagster.tools.spark import SparkTool

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"
BATCH = 10
"""Patients whose pages lie in one object, as in the playbook."""

Pages = dict[str, list[list[dict[str, Any]]]]


def pages_of(patients: int) -> Pages:
    """By data type, the pages of each batch of patients."""
    book = RecordBook(7)
    return {
        data_type.value: [
            [
                page
                for patient in range(first, first + BATCH)
                for page in patient_pages(book, patient, data_type)
            ]
            for first in range(1, patients + 1, BATCH)
        ]
        for data_type in DataType
    }


def patient_pages(book: RecordBook, patient: int, data_type: DataType) -> list[dict[str, Any]]:
    pages, more = [], True
    while more:
        page = book.page(1 + patient % 5, patient, data_type, len(pages) + 1)
        pages.append({"data": page.records})
        more = page.has_more
    return pages


def plain(spark: SparkSession, source: Path, target: Path) -> None:
    """The pipeline as one would write it by hand."""
    normalise = load_function("patient_flow_spark.py:normalise", str(PLAYBOOKS))
    raw = {data_type.value: spark.read.text(str(source / data_type.value)) for data_type in DataType}
    for name, frame in normalise(spark, **raw).items():
        frame.write.partitionBy("facility_id").parquet(str(target / name))


async def best(repeats: int, work: Callable[[int], Awaitable[None]]) -> float:
    times = []
    for repeat in range(repeats):
        started = time.perf_counter()
        await work(repeat)
        times.append(time.perf_counter() - started)
    return min(times)


async def compare(patients: int, repeats: int, folder: Path) -> tuple[float, float]:
    """Seconds of plain PySpark and of the tool."""
    volume = folder / "volume"
    volume.mkdir()
    found = await asyncio.to_thread(embedded.ensure, Settings(), only=["object_store"])
    settings = found.model_copy(update={"home": folder / "home", "pvc_mount_path": volume})
    sessions = SparkSessions(settings)
    spark = await asyncio.to_thread(sessions.get)
    clients = Clients(settings)
    pages = pages_of(patients)
    async with ResultStore(settings, None) as store:
        box = Toolbox(settings, store, Credentials(settings), clients, sessions.get)
        refs = {name: await stored(store, name, batches) for name, batches in pages.items()}
        for name, batches in pages.items():
            write_lines(folder / "raw" / name, batches)

        async def by_hand(repeat: int) -> None:
            await asyncio.to_thread(plain, spark, folder / "raw", folder / f"plain-{repeat}")

        async def by_tool(repeat: int) -> None:
            config = {"function": "patient_flow_spark.py:normalise", "partition_by": ["facility_id"]}
            task = Task(name="datasets", kind="spark", config=config)
            await SparkTool().run(
                ToolCall(repeat, "normalise", task, config, refs, folder=str(PLAYBOOKS)), box
            )

        await by_hand(-1)  # the JVM compiles while it warms up
        seconds = await best(repeats, by_hand), await best(repeats, by_tool)
        for batch in refs.values():
            await asyncio.gather(*(store.delete(ref) for ref in batch))
    await clients.close()
    sessions.stop()
    return seconds


async def stored(store: ResultStore, name: str, batches: list[list[dict[str, Any]]]) -> list[ResultRef]:
    return [
        await store.put(batch, execution_id=0, step="benchmark", name=name, tier=StoreTier.MINIO)
        for batch in batches
    ]


def write_lines(folder: Path, batches: list[list[dict[str, Any]]]) -> None:
    folder.mkdir(parents=True)
    for number, batch in enumerate(batches):
        (folder / f"{number}.json").write_bytes(b"\n".join(map(orjson.dumps, batch)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patients", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        by_hand, by_tool = asyncio.run(compare(arguments.patients, arguments.repeats, Path(folder)))
    print(f"{arguments.patients} patients, {len(DataType)} data types, best of {arguments.repeats}")
    print(f"plain PySpark {by_hand:.2f} s, spark tool {by_tool:.2f} s, ratio {by_tool / by_hand:.2f}")


if __name__ == "__main__":
    main()
