"""Results in parts as inputs of spark steps: as those of one object."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.result_ref import ResultRef, RowsAround
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.tools.base import ToolContext
from tests.spark.conftest import Run

pytestmark = pytest.mark.spark

ROWS = [{"id": n, "text": "a\u2028b"} for n in range(5)]
COUNT = "def main(x):\n    return x.count()"
FIRST = "def main(x):\n    return [row[0] for row in x.collect()]"


async def in_parts(box: ToolContext, values: list[Any], around: RowsAround | None = None) -> ResultRef:
    parts = [
        await box.results.put(value, execution_id=1, step="big", name=f"part-{n}", tier=tier)
        for n, (value, tier) in enumerate(zip(values, (StoreTier.MINIO, StoreTier.EVENTLOG), strict=True))
    ]
    return await box.results.manifest(1, "big", "result", parts, Strategy.CONCAT, around=around)


def lines(rows: list[Any]) -> JsonLines:
    return JsonLines(codec.json_lines(rows), len(rows))


def scope_of(ref: ResultRef) -> dict[str, Any]:
    return {"big": ResultView({"status": "ok", "ref": ref}, ReferenceCache())}


async def test_rows_and_tables_are_rows(run: Run, box: ToolContext) -> None:
    rows = await in_parts(box, [lines(ROWS[:3]), lines(ROWS[3:])])
    table = pa.Table.from_pylist(ROWS)
    tables = await in_parts(box, [table.slice(0, 3), table.slice(3)])

    of_rows = await run(code=FIRST, scope=scope_of(rows), **{"from": {"x": "big"}})
    of_tables = await run(code=FIRST, input={"x": tables})

    assert [json.loads(text) for text in sorted(of_rows.data)] == ROWS
    assert sorted(of_tables.data) == [0, 1, 2, 3, 4]


async def test_rows_beside_fields_are_one_mapping_and_rows_of_their_own(run: Run, box: ToolContext) -> None:
    ref = await in_parts(box, [lines(ROWS[:3]), lines(ROWS[3:])], RowsAround(fields={"row_count": 5}))

    (whole,) = (await run(code=FIRST, scope=scope_of(ref), **{"from": {"x": "big"}})).data
    alone = await run(code=COUNT, scope=scope_of(ref), **{"from": {"x": "big.rows"}})

    assert json.loads(whole) == {"row_count": 5, "rows": ROWS}
    assert alone.data == 5
