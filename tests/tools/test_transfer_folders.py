"""Folders of files as ends of transfers: parts that readers see when all are there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import obstore
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.access.clients import open_bucket
from noetl_dagster.tools.base import ToolContext

PG = {"kind": "postgres", "table": "target"}
ROWS = {"kind": "postgres", "table": "source", "order_by": "id"}


@pytest.fixture
async def source(pool: asyncpg.Pool) -> asyncpg.Pool:
    await pool.execute("create table source as select n as id, 'n ' || n as name from generate_series(1, 2500) as n")
    await pool.execute("create table target (like source)")
    return pool


def names(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in folder.iterdir())


async def test_parts_are_a_table_for_every_reader(run: Any, source: asyncpg.Pool, tmp_path: Path) -> None:
    data = (await run("transfer", source=ROWS, target={"path": "lake/rows/"}, chunk_size=1000, verify="checksum")).data

    folder = tmp_path / "lake" / "rows"
    assert names(folder) == ["00000.parquet", "00001.parquet", "00002.parquet", "_SUCCESS"]
    assert data["verified"] == {"by": "checksum", "read": 2500, "written": 2500, "parts": 3}
    assert data["checksum"].startswith("2500:")
    with duckdb.connect() as connection:
        read = f"select count(distinct id), max(name) from read_parquet('{folder}/*.parquet')"
        assert connection.execute(read).fetchall() == [(2500, "n 999")]
    assert ds.dataset(folder).count_rows() == 2500


async def test_a_folder_of_the_object_store_and_back(
    run: Any, source: asyncpg.Pool, box: ToolContext, tmp_path: Path
) -> None:
    bucket = box.settings.minio_bucket
    folder = {"path": f"s3://{bucket}/{tmp_path.name}/rows/"}

    await run("transfer", source=ROWS, target=folder, chunk_size=1000)
    data = (await run("transfer", source=folder, target=PG, chunk_size=600, verify="checksum")).data

    assert data["rows"] == 2500
    assert await source.fetchval("select count(*) from (select * from source except select * from target) x") == 0
    store = open_bucket(box.settings, "s3", bucket)
    there = await obstore.list(store, prefix=f"{tmp_path.name}/rows").collect_async()
    assert len(there) == 4


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
async def test_append_adds_parts_and_replace_replaces_them(
    run: Any, source: asyncpg.Pool, tmp_path: Path, format: str
) -> None:
    folder = {"path": "rows/", "format": format}
    for mode, count in (("append", 2500), ("append", 5000), ("replace", 2500), ("append", 5000)):
        await run("transfer", source=ROWS, target=folder, mode=mode, chunk_size=2000)
        await run("transfer", source=folder, target=PG, mode="replace")
        assert await source.fetchval("select count(*) from target") == count
    assert len(names(tmp_path / "rows")) == 5


async def test_a_transfer_that_fails_leaves_the_folder_as_it_was(
    run: Any, source: asyncpg.Pool, tmp_path: Path
) -> None:
    await run("transfer", source=ROWS, target={"path": "rows/"})
    before = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    broken = {
        "kind": "postgres",
        "query": "select id, name || 1 / (2000 - id) as name from source order by id",
    }

    with pytest.raises(ToolError, match="division by zero"):
        await run("transfer", source=broken, target={"path": "rows/"}, chunk_size=100)

    assert {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()} == before


async def test_a_transfer_that_is_cancelled_when_it_is_published_does_too(
    run: Any, source: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run("transfer", source=ROWS, target={"path": "rows/"})
    before = ds.dataset(tmp_path / "rows").files
    copy, copies = obstore.copy_async, 0

    async def copying(*arguments: Any) -> Any:
        nonlocal copies
        copies += 1
        if copies == 2:
            transfer.cancel()
            await asyncio.sleep(0.05)  # the store is slow
        return await copy(*arguments)

    monkeypatch.setattr(obstore, "copy_async", copying)
    transfer = asyncio.create_task(
        run("transfer", source=ROWS, target={"path": "rows/"}, mode="append", chunk_size=1000)
    )

    with pytest.raises(asyncio.CancelledError):
        await transfer

    assert copies == 2
    assert ds.dataset(tmp_path / "rows").files == before


async def test_parts_of_other_columns(run: Any, source: asyncpg.Pool, tmp_path: Path) -> None:
    await run("transfer", source={**ROWS, "order_by": ()}, target={"path": "rows/"})
    wider = {"kind": "postgres", "query": "select id, true as even from source"}
    given = {"source": wider, "target": {"path": "rows/"}, "mode": "append"}

    with pytest.raises(ToolError, match=r"folder rows/ has no column even.*on_drift"):
        await run("transfer", **given)
    data = (await run("transfer", **given, on_drift="ignore")).data

    assert data["ignored"] == ["even"]
    assert ds.dataset(tmp_path / "rows").to_table().schema == pa.schema([("id", pa.int64()), ("name", pa.string())])


async def test_what_a_folder_cannot_be(run: Any, source: asyncpg.Pool, tmp_path: Path) -> None:
    (tmp_path / "days" / "day=1").mkdir(parents=True)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "days" / "day=1" / "rows.parquet")

    with pytest.raises(ToolError, match=r"source\.path: days/ has folders, such as day=1"):
        await run("transfer", source={"path": "days/"}, target=PG)
    with pytest.raises(ToolError, match="mode: upsert is for tables"):
        await run("transfer", source=ROWS, target={"path": "rows/"}, mode="upsert")
    with pytest.raises(ToolError, match=r"unique columns in source\.order_by \(whole numbers"):
        await run(
            "transfer",
            source={"kind": "postgres", "query": "select id * 0.5 as id from source", "order_by": "id"},
            target={"path": "rows/"},
            resumable=True,
        )
