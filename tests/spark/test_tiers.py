"""Every tier as the input of a spark step and as its output, each on its real store."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.result_ref import RefKind
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import ToolContext
from tests.spark.conftest import Run
from tests.tiers import google, settings

__all__ = ["google", "settings"]

pytestmark = pytest.mark.spark

FILES = [StoreTier.PVC, StoreTier.MINIO, StoreTier.GCS]
"""One of each way to files: a path, s3a, gs. The others of a kind differ in the store only, see ``tests/storage``."""

SINGLE = StoreTier.KV
"""One of the tiers whose objects pass through the driver."""


@pytest.mark.parametrize("tier", [*FILES, SINGLE])
async def test_results_of_every_tier_are_inputs(run: Run, box: ToolContext, tier: StoreTier) -> None:
    async def put(value: object, name: str) -> Any:
        return await box.results.put(value, execution_id=1, step="made", name=name, tier=tier)

    table = pa.table({"id": pa.array([1, 2], pa.int64()), "at": pa.array([0, 1], pa.timestamp("us"))})
    done = await run(
        command="""
            SELECT name, town, typeof(towns.id) AS kind, typeof(at) AS moment
            FROM people JOIN towns USING (id) JOIN times USING (id)
        """,
        input={
            "people": await put([{"id": 1, "name": "Ada"}, {"id": 3, "name": "Cy"}], "people"),
            "towns": await put(pa.table({"id": pa.array([1, 2], pa.int32()), "town": ["Oslo", "Rome"]}), "t"),
            "times": await put(table, "times"),
        },
        collect=True,
    )
    assert done.data["rows"] == [{"name": "Ada", "town": "Oslo", "kind": "int", "moment": "timestamp_ntz"}]


@pytest.mark.parametrize("tier", FILES)
async def test_a_dataset_on_every_tier_of_files(
    run: Run, box: ToolContext, settings: Settings, tier: StoreTier
) -> None:
    made = await run(
        command="SELECT id, cast(id % 3 AS string) AS part FROM range(0, 100, 1, 2)",
        partition_by="part",
        tier=tier.value,
    )
    ref = made.ref
    assert ref is not None
    assert (ref.kind, ref.store_tier, ref.rows) == (RefKind.DATASET, tier, 100)
    assert ref.extra["columns"] == {"id": "bigint", "part": "string"}
    assert ref.extra["partition_by"] == ["part"]
    assert ref.extra["file_count"] == len(ref.extra["files"]) >= 3
    assert ref.bytes_size == sum(locations.file_sizes(settings, ref.physical_uri).values()) > 0
    query = "SELECT part, count(*) AS n, sum(id) AS s FROM made GROUP BY part ORDER BY part"
    read = await run(command=query, input={"made": ref}, collect=True)
    assert [tuple(row.values()) for row in read.data["rows"]] == [
        ("0", 34, 1683),
        ("1", 33, 1617),
        ("2", 33, 1650),
    ]
    table = await box.results.get(ref)
    assert (table.num_rows, table.schema.field("part").type) == (100, pa.string())
    await box.results.delete(ref)
    assert locations.file_sizes(settings, ref.physical_uri) == {}


@pytest.mark.parametrize("tier", FILES)
async def test_a_failed_job_leaves_nothing(run: Run, settings: Settings, tier: StoreTier, box: ToolContext) -> None:
    broken = "spark.range(0, 100, 1, 4).selectExpr('1 / (id - 99) AS x')"
    with pytest.raises(ToolError, match="DIVIDE_BY_ZERO") as caught:
        await run(code=f'result = {{"good": spark.range(10), "broken": {broken}}}', tier=tier.value)
    assert (caught.value.kind, caught.value.retryable) == ("transform", False)
    assert "step crunch, stage" in str(caught.value)
    base = box.results.dataset_uri(execution_id=1, step="crunch", name="x", tier=tier).partition("/exec/")[0]
    assert locations.file_sizes(settings, f"{base}/exec/") == {}


async def test_small_results_become_one_object_on_the_other_tiers(run: Run, box: ToolContext) -> None:
    made = await run(command="SELECT id, id * 2 AS twice FROM range(5)", tier=SINGLE.value)
    ref = made.ref
    assert ref is not None
    assert (ref.kind, ref.store_tier, ref.rows) == (RefKind.OBJECT, SINGLE, 5)
    assert (await box.results.get(ref))["twice"].to_pylist() == [0, 2, 4, 6, 8]
    read = await run(command="SELECT sum(twice) AS s FROM made", input={"made": ref}, collect=True)
    assert read.data["rows"] == [{"s": 20}]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"command": "SELECT id FROM range(20)", "max_rows": 10},
            ["more than 10 rows", "choose minio or pvc"],
        ),
        ({"command": "SELECT 1 AS a", "partition_by": "a"}, ["tier kv holds single objects", "partition_by"]),
        ({"command": "SELECT 1 AS a", "format": "csv"}, ["tier kv takes parquet", "csv"]),
    ],
)
async def test_what_a_tier_cannot_hold_is_refused(run: Run, config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        await run(**config, tier="kv")
    assert all(word in str(caught.value) for word in words), caught.value
