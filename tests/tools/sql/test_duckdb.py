"""The duckdb tool over files, references and lists."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.settings import StoreTier
from noetl_dagster.tools.base import ToolContext
from tests.tiers import google, settings

__all__ = ["google", "settings"]

ROWS = pa.table({"id": list(range(1000)), "kind": ["a", "b"] * 500})


async def test_results_are_shaped_as_those_of_postgres(run: Any) -> None:
    sql = """
        create table t (id int, day date);
        insert into t values (1, '2026-01-02'), (2, null);
        from t order by id
    """

    data = (await run("duckdb", command=sql)).data

    assert data["command_1"] == {"status": "ok", "row_count": 2}
    assert data["rows"] == [{"id": 1, "day": "2026-01-02"}, {"id": 2, "day": None}]
    assert data["columns"] == ["id", "day"]


@pytest.mark.parametrize(
    ("sql", "kind", "code"),
    [
        ("select 1 as a, 2 as a", "schema", None),
        (
            "select case when i = 5000 then ('x' || i)::int else i end as n from range(6000) t(i)",
            "db",
            "ConversionException",
        ),
        ("select case when i = 5000 then 'inf'::double else i end as n from range(6000) t(i)", "transform", "VALUE"),
    ],
)
async def test_rows_that_cannot_be_results(run: Any, sql: str, kind: str, code: str | None) -> None:
    with pytest.raises(ToolError) as caught:
        await run("duckdb", command=sql)
    assert (caught.value.kind, caught.value.code) == (kind, code)
    if code == "VALUE":
        assert "row 5001, column n" in str(caught.value)


async def test_decimals_of_duckdb(run: Any) -> None:
    sql = "select 1.10::decimal(20, 4) as a, 7::hugeint as b"
    rows = [(await run("duckdb", command=sql, numbers=numbers)).data["rows"] for numbers in ("text", "float")]
    assert rows == [[{"a": "1.1000", "b": 7}], [{"a": 1.1, "b": 7}]]


async def test_parameters_and_lists_as_views(run: Any) -> None:
    people = [{"name": "a", "age": 3}, {"name": "b", "age": 5}]

    data = (
        await run(
            "duckdb",
            command="select name from people where age > :age",
            params={"age": 4},
            input={"people": people},
        )
    ).data

    assert data["rows"] == [{"name": "b"}]


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO, StoreTier.DB, StoreTier.GCS])
async def test_references_are_views(run: Any, box: ToolContext, tier: StoreTier) -> None:
    ref = await box.results.put(ROWS, execution_id=7001, step="load", name="rows", tier=tier)
    sql = "select kind, count(*) as n from load group by kind order by kind"

    for given in (ref, ref.ref, ref.model_dump(mode="json")):
        data = (await run("duckdb", command=sql, input={"load": given})).data
        assert data["rows"] == [{"kind": "a", "n": 500}, {"kind": "b", "n": 500}]


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO, StoreTier.GCS])
async def test_physical_address_in_the_query(run: Any, box: ToolContext, tier: StoreTier) -> None:
    ref = await box.results.put(ROWS, execution_id=7001, step="load", name="rows", tier=tier)

    data = (await run("duckdb", command=f"select count(*) as n from read_parquet('{ref.physical_uri}')")).data

    assert data["rows"] == [{"n": 1000}]


@pytest.mark.parametrize("tier", [StoreTier.GCS])
async def test_a_dataset_is_written_in_place(run: Any, box: ToolContext, tier: StoreTier) -> None:
    load, people = [
        await box.results.put(value, execution_id=7001, step="load", name="rows", tier=tier)
        for value in (ROWS, [{"kind": "a", "name": "Ada"}])
    ]
    folder = box.results.dataset_uri(execution_id=7001, step="split", name="kinds", tier=tier)
    copy = f"copy (from load join people using (kind) where id < 10) to '{folder}part-0.parquet'; select 1 as done"

    await run("duckdb", command=copy, input={"load": load, "people": people})
    kinds = await box.results.register_dataset(folder, execution_id=7001, step="split", name="kinds")

    assert kinds.store_tier is tier
    data = (await run("duckdb", command="select count(*) as n from kinds", input={"kinds": kinds})).data
    assert data["rows"] == [{"n": 5}]


async def test_rows_of_a_small_result_are_a_table_as_those_of_a_stored_one(run: Any) -> None:
    small = {"rows": [{"n": 1}, {"n": 2}], "row_count": 2, "status": "ok"}
    done = await run("duckdb", input={"sums": small}, command="select sum(n)::int as total from sums")
    assert done.data["rows"] == [{"total": 3}]


async def test_table_result_and_database_file(run: Any, tmp_path: Path) -> None:
    await run("duckdb", database="own.db", command="create table t as select range as id from range(10)")

    table = (await run("duckdb", database="own.db", command="select * from t", **{"as": "table"})).data

    assert isinstance(table, pa.Table)
    assert table.num_rows == 10
    assert (tmp_path / "own.db").exists()


async def test_a_query_ends_with_its_call(run: Any) -> None:
    with pytest.raises(TimeoutError):  # the query itself would take longer than pytest waits
        async with asyncio.timeout(0.3):
            await run(
                "duckdb",
                command="select count(*) from range(10000000000) a, range(900) b where hash(a.range) = b.range",
            )
