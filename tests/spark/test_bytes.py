"""What a spark step has written, in bytes, and what Spark's own readers have read of plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.tools.base import ToolContext, ToolResult
from tests.spark.conftest import Run, put

pytestmark = pytest.mark.spark

ROWS = [{"n": number, "text": f"{number} " + "x" * 50} for number in range(20_000)]
ALL = "SELECT * FROM rows"


def cost(done: ToolResult) -> dict[str, Any]:
    found: dict[str, Any] = done.details["spark"]
    return found


def ref_of(done: ToolResult) -> ResultRef:
    assert done.ref is not None
    return done.ref


@pytest.mark.parametrize(
    "staged", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["staged", "by the data source"]
)
async def test_results_count_as_they_are_stored(box: ToolContext, run: Run, staged: bool) -> None:
    box.settings = box.settings.model_copy(update={"spark_staging": staged})
    ref = await put(box, ROWS, "rows", compression="gzip")
    done = await run(command=ALL, input={"rows": ref}, tier="minio")
    assert cost(done)["output_bytes"] == ref_of(done).bytes_size > 10_000


async def test_datasets_of_a_step_are_added_up_and_what_is_read_counts_nothing(box: ToolContext, run: Run) -> None:
    made = await run(
        code="result = {name: spark.range(20000).selectExpr('id', 'id % 3 AS part') for name in ('a', 'b')}",
        tier="minio",
        partition_by="part",
    )
    first, second = (ResultRef.model_validate(made.data[name]) for name in ("a", "b"))
    assert cost(made)["output_bytes"] == first.bytes_size + second.bytes_size
    done = await run(command=ALL, input={"rows": first}, tier="kv", collect=True, max_rows=20_000)
    assert cost(done)["output_bytes"] == 0


async def test_objects_that_go_through_the_driver_count_too(box: ToolContext, run: Run) -> None:
    ref = await put(box, ROWS[:100], "small", StoreTier.KV)
    done = await run(command=ALL, input={"rows": ref}, tier="kv")
    assert cost(done)["output_bytes"] == ref_of(done).bytes_size


async def test_of_plain_files_spark_counts_what_it_reads(box: ToolContext, run: Run, tmp_path: Path) -> None:
    made = await run(command="SELECT id, uuid() AS text FROM range(20000)", tier="pvc")
    assert cost(made)["output_bytes"] == ref_of(made).bytes_size
    size = ref_of(made).bytes_size
    done = await run(command=ALL, input={"rows": ref_of(made)}, tier="pvc")
    assert size * 0.9 < cost(done)["input_bytes"] < size * 1.2, "all columns, and the footers"
    few = await run(command="SELECT sum(id) AS s FROM rows", input={"rows": ref_of(made)}, collect=True)
    assert cost(few)["input_bytes"] < size * 0.3, "one column"
    file = tmp_path / "rows.csv"
    file.write_text("".join(f"{number},abc\n" for number in range(20_000)))
    rows = {"path": str(file), "schema": "n INT, text STRING"}
    plain = await run(command=ALL, input={"rows": rows}, tier="pvc")
    assert cost(plain)["input_bytes"] == file.stat().st_size
    assert cost(plain)["output_bytes"] == ref_of(plain).bytes_size
