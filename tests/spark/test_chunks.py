"""Datasets in chunks: a reference for each file, told of when all are written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.playbook.models import Task
from noetl_dagster.result_ref import RefKind
from noetl_dagster.settings import StoreTier
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.spark.tool import SparkTool
from tests.spark.conftest import Run
from tests.tools.chunk_log import Killed, ListLog

pytestmark = pytest.mark.spark

SQL = "SELECT id, concat('part ', id % 3) AS part FROM range(0, 12, 1, 4)"


def ids(rows: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [sorted(row["id"] for row in part) for part in rows]


@pytest.mark.parametrize("tier", [StoreTier.MINIO, StoreTier.DISK])
@pytest.mark.parametrize("partition_by", [(), ("part",)])
async def test_a_chunk_is_a_file(run: Run, box: ToolContext, tier: StoreTier, partition_by: tuple[str, ...]) -> None:
    log = box.chunks = ListLog(wanted=True)

    result = await run(command=SQL, tier=tier.value, partition_by=list(partition_by))

    assert result.ref.kind is RefKind.DATASET
    rows = await log.rows(box)
    assert sorted(itertools.chain(*ids(rows))) == list(range(12))
    assert [chunk.ref.rows for chunk in log.chunks] == [len(part) for part in rows]
    assert sum(chunk.ref.bytes_size for chunk in log.chunks) == result.ref.bytes_size
    assert [chunk.more for chunk in log.chunks] == [True] * (len(rows) - 1) + [False]
    assert all(row["part"] == f"part {row['id'] % 3}" for part in rows for row in part)
    assert len(rows) > 2
    again = await box.results.find(log.chunks[1].ref.ref)  # it is a result of its own
    assert again.physical_uri == log.chunks[1].ref.physical_uri


async def test_nothing_is_told_where_nobody_takes_it(run: Run, box: ToolContext) -> None:
    log = box.chunks = ListLog()

    await run(command=SQL)

    assert log.chunks == []


async def test_spark_does_not_run_again_for_what_it_has_written(box: ToolContext, tmp_path: Path) -> None:
    log = box.chunks = ListLog(wanted=True)
    config = {"command": SQL}
    call = ToolCall(1, "crunch", Task(name="work", kind="spark", config=config), config, {}, folder=str(tmp_path))
    log.stops_after = 2
    with pytest.raises(Killed):
        await SparkTool().run(call, box)
    log.stops_after = None
    box.spark = lambda: pytest.fail("Spark was asked again")

    result = await SparkTool().run(call, box)

    assert sorted(itertools.chain(*ids(await log.rows(box)))) == list(range(12))
    assert result.ref.rows == 12
    assert [chunk.more for chunk in log.chunks] == [True, True, True, False]


async def test_a_single_object_is_one_chunk(run: Run, box: ToolContext) -> None:
    log = box.chunks = ListLog(wanted=True)

    await run(command=SQL, tier="kv")

    assert ids(await log.rows(box)) == [list(range(12))]
