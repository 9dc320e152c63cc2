"""What the spark tool costs: the patient flow's normalisation in plain PySpark, and through the tool.

    python -m benchmarks.spark --patients 2000
    python -m benchmarks.spark --records 20000000 --cores 1 2

Both read the same raw pages and write the same Parquet. The tool finds the pages in the minio tier, one object
a batch of patients. Plain PySpark reads them once from a local copy, its best case, and once from the same
objects, as one would fetch them by hand. Prints seconds of each (best of ``--repeats``, in turns) and ratios.

With ``--records`` the pages are synthetic vital signs on the shared volume, of a hundredth, a tenth and all
of that number, each with every number of cores: how cost grows with data and falls with cores. 20 million
take some 3 GB of disk.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore
import orjson
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

from benchmarks._no_log import NoLog
from examples.records_api import DataType, RecordBook
from noetl_dagster import embedded
from noetl_dagster.playbook.models import Task
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.datasets import Layout, register, write_dataset
from noetl_dagster.spark.functions import load_function
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.locations import object_key
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers.objects import minio_store
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.spark.tool import SparkTool

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"
RECORDS_A_PAGE = 10
BATCH = 10
"""Patients whose pages lie in one object, as in the playbook."""

Pages = dict[str, list[list[dict[str, Any]]]]


def pages_of(patients: int) -> Pages:
    """By data type, the pages of each batch of patients."""
    book = RecordBook(7)
    return {
        data_type.value: [
            [page for patient in range(first, first + BATCH) for page in patient_pages(book, patient, data_type)]
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


def write_plain(spark: SparkSession, raw: Mapping[str, DataFrame], target: Path) -> None:
    """The pipeline as one would write it by hand."""
    normalise = load_function("patient_flow_spark.py:normalise", str(PLAYBOOKS))
    for name, frame in normalise(spark, **raw).items():
        frame.write.partitionBy("facility_id").parquet(str(target / name))


def local_copy(spark: SparkSession, source: Path) -> dict[str, DataFrame]:
    return {data_type.value: spark.read.text(str(source / data_type.value)) for data_type in DataType}


def fetched_by_hand(
    spark: SparkSession, settings: Settings, refs: Mapping[str, list[ResultRef]]
) -> dict[str, DataFrame]:
    """Pages of the objects themselves, fetched in as many tasks as there are cores."""
    context = spark.sparkContext

    def fetch(keys: Iterator[str]) -> Iterator[tuple[str]]:
        store = minio_store(settings)
        for key in keys:
            for page in orjson.loads(bytes(obstore.get(store, key).bytes())):
                yield (orjson.dumps(page).decode(),)

    def frame(objects: list[ResultRef]) -> DataFrame:
        keys = [object_key(ref.physical_uri) for ref in objects]
        pages = context.parallelize(keys, context.defaultParallelism).mapPartitions(fetch)
        return spark.createDataFrame(pages, "value STRING")

    return {name: frame(objects) for name, objects in refs.items()}


async def best(repeats: int, *works: Callable[[int], Awaitable[None]]) -> list[float]:
    """Least seconds of each, run in turns: a busy machine then slows all of them."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats):
        for own, work in zip(times, works, strict=True):
            started = time.perf_counter()
            await work(repeat)
            own.append(time.perf_counter() - started)
    return [min(own) for own in times]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the same work by hand and through the tool; ``by_hand_remote``: from the stored objects."""

    by_hand: float
    by_tool: float
    by_hand_remote: float | None = None

    def __str__(self) -> str:
        text = f"plain PySpark {self.by_hand:.2f} s, spark tool {self.by_tool:.2f} s, "
        text += f"ratio {self.by_tool / self.by_hand:.2f}"
        if self.by_hand_remote is None:
            return text
        ratio = self.by_tool / self.by_hand_remote
        return f"{text}; plain PySpark from the objects {self.by_hand_remote:.2f} s, ratio {ratio:.2f}"


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[tuple[ToolContext, SparkSession]]:
    """A toolbox without an event log, and its Spark session."""
    sessions, clients = SparkSessions(settings), Clients(settings)
    spark = await asyncio.to_thread(sessions.get)
    async with ResultStore(settings, None) as store:
        yield NoLog().toolbox(settings, store, Credentials(settings), clients, sessions.get), spark
    await clients.close()
    sessions.stop()


async def by_tool(context: ToolContext, inputs: Mapping[str, Any], execution_id: int) -> None:
    config = {"function": "patient_flow_spark.py:normalise", "partition_by": ["facility_id"]}
    task = Task(name="datasets", kind="spark", config=config)
    call = ToolCall(execution_id, "normalise", task, config, dict(inputs), folder=str(PLAYBOOKS))
    await SparkTool().run(call, context)


async def compare(patients: int, repeats: int, folder: Path) -> Measured:
    """The records API's pages of the minio tier."""
    volume = folder / "volume"
    volume.mkdir()
    found = await asyncio.to_thread(embedded.ensure, Settings(), only=["object_store"])
    settings = found.model_copy(update={"home": folder / "home", "pvc_mount_path": volume})
    pages = pages_of(patients)
    async with opened(settings) as (context, spark):
        refs = {name: await stored(context.results, name, batches) for name, batches in pages.items()}
        for name, batches in pages.items():
            write_lines(folder / "raw" / name, batches)

        def write(remote: bool, target: str) -> None:
            raw = fetched_by_hand(spark, settings, refs) if remote else local_copy(spark, folder / "raw")
            write_plain(spark, raw, folder / target)

        async def by_hand(repeat: int) -> None:
            await asyncio.to_thread(write, False, f"plain-{repeat}")

        async def by_hand_remote(repeat: int) -> None:
            await asyncio.to_thread(write, True, f"remote-{repeat}")

        await by_hand(-1)  # the JVM compiles while it warms up
        times = await best(repeats, by_hand, lambda repeat: by_tool(context, refs, repeat), by_hand_remote)
        measured = Measured(*times)
        for batch in refs.values():
            await asyncio.gather(*(context.results.delete(ref) for ref in batch))
    return measured


async def compare_synthetic(records: int, cores: int, repeats: int, folder: Path) -> Measured:
    """Synthetic vital signs on the shared volume."""
    volume = folder / "volume"
    volume.mkdir(parents=True)
    update = {"home": folder / "home", "pvc_mount_path": volume, "spark_master": f"local[{cores}]"}
    layout = Layout(tier=StoreTier.PVC)
    async with opened(Settings().model_copy(update=update)) as (context, spark):
        store = context.results
        uri = store.dataset_uri(execution_id=0, step="benchmark", name="raw", tier=StoreTier.PVC)
        written = await asyncio.to_thread(write_dataset, synthetic(spark, records), context.settings, uri, layout)
        ref = await register(written, store, layout, execution_id=0, step="benchmark", name="raw")
        normalise = load_function("patient_flow_spark.py:normalise", str(PLAYBOOKS))

        def write_by_hand(target: Path) -> None:
            frame = normalise(spark, vital_signs=spark.read.parquet(uri))["vital_signs"]
            frame.write.partitionBy("facility_id").parquet(str(target))

        async def by_hand(repeat: int) -> None:
            await asyncio.to_thread(write_by_hand, folder / f"plain-{repeat}")

        await by_hand(-1)
        return Measured(*await best(repeats, by_hand, lambda repeat: by_tool(context, {"vital_signs": ref}, repeat)))


def synthetic(spark: SparkSession, records: int) -> DataFrame:
    """Pages of ``RECORDS_A_PAGE`` records as JSON texts, of 50 facilities; made by Spark itself."""
    page, number = F.col("id"), F.sequence(F.lit(0), F.lit(RECORDS_A_PAGE - 1))
    record = lambda n: F.struct(  # noqa: E731, a lambda is what transform takes
        F.format_string("F%03d", page % 50).alias("facility_id"),
        F.format_string("P%08d", page).alias("patient_id"),
        F.format_string("V%d-%d", page, n).alias("vital_sign_id"),
        (95 + (page * 7 + n) % 80).cast("string").alias("systolic_mmhg"),
        (55 + (page * 3 + n) % 45).alias("diastolic_mmhg"),
        F.when(page % 16 == 0, "n/a").otherwise((50 + page % 60).cast("string")).alias("pulse_per_minute"),
        F.format_string("36.%d", page % 10).alias("temperature_c"),
        F.date_add(F.lit("2023-01-01").cast("date"), (page % 700).cast("int")).alias("measured_on"),
    )
    pages = spark.range(records // RECORDS_A_PAGE)
    return pages.select(F.to_json(F.struct(F.transform(number, record).alias("data"))).alias("value"))


async def stored(store: ResultStore, name: str, batches: list[list[dict[str, Any]]]) -> list[ResultRef]:
    return [
        await store.put(batch, execution_id=0, step="benchmark", name=name, tier=StoreTier.MINIO) for batch in batches
    ]


def write_lines(folder: Path, batches: list[list[dict[str, Any]]]) -> None:
    folder.mkdir(parents=True)
    for number, batch in enumerate(batches):
        (folder / f"{number}.json").write_bytes(b"\n".join(map(orjson.dumps, batch)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patients", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--records", type=int, help="synthetic records in place of the API's patients")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    if arguments.records is None:
        with TemporaryDirectory() as folder:
            measured = asyncio.run(compare(arguments.patients, arguments.repeats, Path(folder)))
        print(f"{arguments.patients} patients, {len(DataType)} data types, best of {arguments.repeats}: {measured}")
        return
    for records in (arguments.records // 100, arguments.records // 10, arguments.records):
        for cores in arguments.cores:
            with TemporaryDirectory() as folder:
                work = compare_synthetic(records, cores, arguments.repeats, Path(folder) / "run")
                print(f"{records:>11,} records, {cores} cores: {asyncio.run(work)}", flush=True)


if __name__ == "__main__":
    main()
