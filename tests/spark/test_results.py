"""How executors read stored objects: shares of even size, in order, ahead of their turn, verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from noetl_dagster.errors import IntegrityError
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.result_ref import RefKind
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark import datasets
from noetl_dagster.spark.frames import part_of
from noetl_dagster.spark.results import (
    AT_ONCE,
    BYTES_A_PARTITION,
    StoredPart,
    _ResultsReader,
    divide_parts,
)
from noetl_dagster.storage.codec import digest_of
from noetl_dagster.tools.base import ToolContext
from tests.spark.conftest import Run

pytestmark = pytest.mark.spark


def part(number: int, size: int) -> StoredPart:
    return StoredPart(f"s3://b/{number}", "application/json", bytes_size=size)


def test_shares_are_runs_of_about_the_same_size() -> None:
    small = [part(number, 100 + number % 7) for number in range(1000)]
    runs = divide_parts(small, 4)
    assert [one for run in runs for one in run] == small
    assert len(runs) == 4
    assert all(240 <= len(run) <= 260 for run in runs)
    large = [part(number, BYTES_A_PARTITION) for number in range(10)]
    assert [len(run) for run in divide_parts(large, 2)] == [1] * 10
    assert divide_parts([part(0, 5), part(1, BYTES_A_PARTITION)], 2) == [
        [part(0, 5)],
        [part(1, BYTES_A_PARTITION)],
    ]
    assert divide_parts([part(0, 0), part(1, 0)], 4) == [[part(0, 0), part(1, 0)]]
    assert divide_parts([], 4) == [[]]


def test_parts_come_in_order_and_damaged_ones_are_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, pvc_mount_path=tmp_path)
    parts = []
    for number in range(3 * AT_ONCE):
        data = f"[{number}]".encode()
        (tmp_path / f"{number}.json").write_bytes(data)
        uri = (tmp_path / f"{number}.json").as_uri()
        parts.append(StoredPart(uri, "application/json", bytes_size=len(data), sha256=digest_of(data)))
    reader = _ResultsReader(settings, parts, StructType().add("value", "string"), 1)
    (share,) = reader.partitions()
    values = [value.as_py() for batch in reader.read(share) for value in batch.column(0)]
    assert values == [str(number) for number in range(3 * AT_ONCE)]
    (tmp_path / "20.json").write_bytes(b"[99]")
    with pytest.raises(IntegrityError, match=r"20\.json were changed or damaged"):
        list(reader.read(InputPartition(parts)))


async def test_a_damaged_result_fails_the_step(run: Run, box: ToolContext) -> None:
    ref = await box.results.put([{"n": 1}], execution_id=1, step="made", name="x", tier=StoreTier.PVC)
    assert part_of(ref).sha256
    Path(ref.physical_uri.removeprefix("file://")).write_bytes(b'[{"n": 2}]')  # noqa: ASYNC240
    with pytest.raises(Exception, match="changed or damaged"):
        await run(command="SELECT * FROM rows", input={"rows": ref}, collect=True)


async def test_files_of_a_buckets_dataset_are_read_by_several_tasks(run: Run) -> None:
    made = await run(
        code="result = spark.range(0, 4000, 1, 8)", result=ResultSpec(store=StoreTier.MINIO, name="numbers")
    )
    assert made.ref is not None
    read = await run(code="result = [rows.rdd.getNumPartitions(), rows.count()]", input={"rows": made.ref})
    assert read.data == [2, 4000]


@pytest.mark.parametrize(("form", "options"), [("json", {}), ("orc", {}), ("csv", {"header": True, "sep": ";"})])
async def test_other_formats_are_written_and_read_again(run: Run, form: str, options: dict) -> None:
    query = "SELECT id, concat('n', id) AS name, cast(id % 2 AS int) AS part FROM range(10)"
    made = await run(command=query, format=form, options=options, partition_by=["part"])
    assert made.ref is not None
    assert (made.ref.kind, made.ref.rows, made.ref.content_type) == (
        RefKind.DATASET,
        10,
        f"application/x-{form}",
    )
    assert all(f".{form}" in name and name.startswith("part=") for name in made.ref.extra["files"])
    read = await run(
        command="SELECT part, count(*) AS rows, sum(id) AS total, min(name) AS name FROM made GROUP BY 1 ORDER BY 1",
        input={"made": made.ref},
        collect=True,
    )
    assert read.data["rows"] == [
        {"part": 0, "rows": 5, "total": 20, "name": "n0"},
        {"part": 1, "rows": 5, "total": 25, "name": "n1"},
    ]


async def test_object_tiers_take_parquet_only(run: Run) -> None:
    with pytest.raises(Exception, match="tier minio takes parquet; csv"):
        await run(command="SELECT 1", format="csv", tier="minio")


async def test_rows_that_only_the_executors_have_are_an_error(
    run: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "sizes_of_files", lambda *_: {})  # as if they were written on other machines
    with pytest.raises(Exception, match=r"wrote 3 rows to .* no file is there; mount the volume in executors"):
        await run(command="SELECT id FROM range(3)", tier="pvc")
    assert settings.pvc_mount_path is not None
    assert list(settings.pvc_mount_path.rglob("*.parquet")) == []


async def test_tables_are_inputs(run: Run, spark: SparkSession) -> None:
    spark.range(5).write.mode("overwrite").saveAsTable("five")
    try:
        found = await run(command="SELECT sum(id) AS s FROM t", input={"t": {"table": "five"}}, collect=True)
        assert found.data["rows"] == [{"s": 10}]
    finally:
        spark.sql("DROP TABLE five")
