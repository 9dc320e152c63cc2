"""Transfers between real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox

FILL = """
create table source as
select n as id, 'name\t' || n || '\\' as name, n * 1.5::numeric as price, now() as at,
       array['a', 'b "q"', null] as tags,
       jsonb_build_object('n', n, 'text', E'line\\nbreak') as extra,
       decode('00ff', 'hex') as raw, interval '90 s' as took,
       n % 2 = 0 as even, gen_random_uuid() as uid
from generate_series(1, 2500) as n
"""
SAME = "select count(*) from (select * from source except select * from target) as missing"


@pytest.fixture
async def source(pool: asyncpg.Pool) -> asyncpg.Pool:
    await pool.execute(FILL)
    await pool.execute("create table target (like source); alter table target add primary key (id)")
    return pool


PG = {"kind": "postgres", "table": "target"}


async def test_postgres_to_postgres_keeps_every_type(run: Any, source: asyncpg.Pool) -> None:
    data = (
        await run("transfer", source={"kind": "postgres", "table": "source"}, target=PG, chunk_size=1000)
    ).data

    assert data == {
        "rows": 2500,
        "chunks": 3,
        "mode": "append",
        "source": "postgres",
        "target": "postgres",
        "checksum": None,
        "verified": {"by": "rows", "read": 2500, "written": 2500},
    }
    assert await source.fetchval(SAME) == 0


async def test_modes_of_a_table(run: Any, source: asyncpg.Pool) -> None:
    query = {
        "kind": "postgres",
        "query": "select id, name from source where id <= :last",
        "params": {"last": 10},
    }
    await run("transfer", source=query, target=PG)
    with pytest.raises(ToolError, match="duplicate key"):
        await run("transfer", source=query, target=PG)
    twice = {
        "kind": "postgres",
        "query": "select 1 as id, 'x' as name union all select 1, 'z' union all select 11, 'y'",
    }
    await run("transfer", source=twice, target=PG, mode="upsert")
    assert await source.fetchval("select count(*) from target") == 11
    await run("transfer", source=query, target=PG, mode="replace")
    assert await source.fetchval("select count(*) from target") == 10


async def test_failed_transfer_changes_nothing(run: Any, source: asyncpg.Pool) -> None:
    await run("transfer", source={"kind": "postgres", "table": "source"}, target=PG)
    broken = "select 1 / (2000 - id) as id from source order by id"

    with pytest.raises(ToolError):
        await run(
            "transfer",
            source={"kind": "postgres", "query": broken},
            target=PG,
            mode="replace",
            chunk_size=100,
        )

    assert await source.fetchval("select count(*) from target") == 2500


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("where", ["s3", "file"])
async def test_through_objects_and_back(
    run: Any, source: asyncpg.Pool, box: Toolbox, ending: str, where: str
) -> None:
    folder = f"s3://{box.settings.minio_bucket}/transfer" if where == "s3" else "out"
    path = {"kind": "object", "path": f"{folder}/rows.{ending}"}

    await run("transfer", source={"kind": "postgres", "table": "source"}, target=path, chunk_size=700)
    data = (await run("transfer", source=path, target=PG, chunk_size=1000)).data

    assert data["rows"] == 2500
    different = SAME.replace("select *", "select id, name, tags, extra, raw, took, even, uid").replace(
        "select id, name", "select id, name", 1
    )
    assert await source.fetchval(different) == 0


async def test_csv_values_are_converted_by_the_server(run: Any, source: asyncpg.Pool, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,name,even,price\n1,a,true,1.50\n2,,false,\n")

    await run("transfer", source={"path": "in.csv"}, target=PG)

    rows = await source.fetch("select id, name, even, price::text from target order by id")
    assert [tuple(row) for row in rows] == [(1, "a", True, "1.50"), (2, None, False, None)]


async def test_duckdb_both_ways(run: Any, source: asyncpg.Pool) -> None:
    duck = {"kind": "duckdb", "database": "own.db", "table": "t"}
    rows = {"kind": "postgres", "query": "select id, name, price, at, even from source"}

    await run("transfer", source=rows, target=duck, chunk_size=1000)
    await run("transfer", source=rows, target={**duck, "key": "id"}, mode="upsert", chunk_size=1000)
    data = (await run("transfer", source={**duck, "query": "select * from t"}, target=PG)).data

    assert data["rows"] == 2500
    assert await source.fetchval("select sum(price) from target") == await source.fetchval(
        "select sum(price) from source"
    )


async def test_http_both_ways(run: Any, source: asyncpg.Pool, server: str) -> None:
    await run("transfer", source={"kind": "http", "url": f"{server}/lines", "format": "jsonl"}, target=PG)
    rows = await source.fetch("select id, name from target order by id")
    assert [tuple(row) for row in rows] == [(1, "a"), (2, None)]

    data = (
        await run(
            "transfer",
            source={"kind": "postgres", "table": "target"},
            target={"kind": "http", "url": f"{server}/in"},
        )
    ).data
    assert data["rows"] == 2


async def test_result_by_reference_to_a_file(run: Any, box: Toolbox, tmp_path: Path) -> None:
    ref = await box.results.put([{"a": n} for n in range(50)], execution_id=7001, step="load", name="rows")

    await run("transfer", source={"ref": ref}, target={"path": "rows.parquet"}, chunk_size=20)

    assert pq.read_table(tmp_path / "rows.parquet").column("a").to_pylist() == list(range(50))


async def test_mistakes_name_the_end_and_the_field(run: Any) -> None:
    with pytest.raises(ToolError, match=r"target\.tabel"):
        await run("transfer", source={"ref": "noetl://x"}, target={"kind": "postgres", "tabel": "t"})
    with pytest.raises(ToolError, match="source must be a mapping"):
        await run("transfer", source="x", target={"kind": "postgres"})
