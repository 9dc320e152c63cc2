"""Transfers from and to SQLite and MySQL."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.registry import tool_for

if TYPE_CHECKING:
    from tests.mysql import Server

CREATE = "create table target (id int primary key, name varchar(20) not null, price double)"


@dataclass
class Place:
    """A database with an empty table ``target``."""

    end: dict[str, Any]
    execute: Callable[..., list[Any]]
    server: Server | None = None

    def rows(self) -> list[Any]:
        return self.execute("select id, name, price from target order by id")


@pytest.fixture(params=["sqlite", "mysql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "mysql":
        server: Server = request.getfixturevalue("mysql")
        database = server.new_database()
        end = {"kind": "mysql", "auth": {"type": "mysql", "url": server.url(database)}, "table": "target"}
        found = Place(end, lambda *statements: server.execute(database, *statements), server)
    else:

        def execute(*statements: str) -> list[Any]:
            with contextlib.closing(sqlite3.connect(tmp_path / "own.sqlite", isolation_level=None)) as opened:
                for statement in statements:
                    cursor = opened.execute(statement)
                return cursor.fetchall()

        found = Place({"kind": "sqlite", "database": "own.sqlite", "table": "target"}, execute)
    found.execute(CREATE)
    return found


def numbers(last: int) -> dict[str, Any]:
    query = "select n as id, 'name ' || n as NAME, n * 1.5::numeric as price from generate_series(1, :last) as n"
    return {"kind": "postgres", "query": query, "params": {"last": last}}


async def test_from_postgres_and_to_a_file(run: Any, place: Place, tmp_path: Path) -> None:
    data = (await run("transfer", source=numbers(2500), target=place.end, chunk_size=1000)).data
    query = "select id, name, price from target where price > ? order by id"
    source = {key: value for key, value in place.end.items() if key != "table"} | {"query": query, "params": [3]}
    await run("transfer", source=source, target={"path": str(tmp_path / "rows.parquet")}, chunk_size=1000)

    assert data["verified"] == {"by": "rows", "read": 2500, "written": 2500}
    assert place.rows()[-1] == (2500, "name 2500", 3750.0)
    found = duckdb.sql(f"select min(id), max(name), sum(price) from read_parquet('{tmp_path}/rows.parquet')").fetchall()
    assert found == [(3, "name 999", sum(n * 1.5 for n in range(3, 2501)))]


async def test_modes(run: Any, place: Place) -> None:
    await run("transfer", source=numbers(3), target=place.end)
    place.execute("update target set name = 'old'")

    with pytest.raises(ToolError) as caught:
        await run("transfer", source=numbers(4), target=place.end)
    await run("transfer", source=numbers(4), target={**place.end, "key": "id"}, mode="upsert")
    upserted = place.rows()
    await run("transfer", source=numbers(2), target=place.end, mode="replace")

    assert caught.value.kind == "db_constraint"
    assert [name for _, name, _ in upserted] == ["name 1", "name 2", "name 3", "name 4"]
    assert len(place.rows()) == 2


async def test_a_failed_transfer_changes_nothing(run: Any, place: Place) -> None:
    await run("transfer", source=numbers(3), target=place.end)
    broken = {
        "kind": "postgres",
        "query": "select 2000 / (1900 - n) + 10 * n as id, '' as name from generate_series(1, 1901) n",
    }

    with pytest.raises(ToolError, match="division by zero"):
        await run("transfer", source=broken, target=place.end, mode="replace", chunk_size=100)

    assert len(place.rows()) == 3


async def test_appended_rows_are_written_once(box: ToolContext, place: Place, tmp_path: Path) -> None:
    removals: list[Any] = []
    own = replace(box, after=lambda call, removal: removals.append(removal))
    place.execute("create table free (id int, name varchar(20), price double)")
    config = {"source": numbers(3), "target": {**place.end, "table": "free"}}
    task = Task(name="copy", kind="transfer", config=config)
    call = ToolCall(7001, "stage", task, config, {}, folder=str(tmp_path), command_id="7001:stage:1:1")

    async def rows_after(number: int) -> tuple[dict[str, Any], int]:
        data = (await tool_for("transfer").run(replace(call, number=number), own)).data
        return data, place.execute("select count(*) from free")[0][0]

    first, one = await rows_after(1)
    again, still_one = await rows_after(1)  # as after a kill between the commit and the log
    _, two = await rows_after(2)  # the task calls it again
    _, still_two = await rows_after(1)  # a kill after that: the command begins with its first call
    await removals[-1]()

    assert first == {**again, "chunks": 1}
    assert [one, still_one, two, still_two] == [3, 3, 6, 6]
    assert place.execute("select * from noetl_transfer") == []


async def test_columns_that_the_target_lacks(run: Any, place: Place) -> None:
    source = {"kind": "postgres", "query": "select 1 as id, 'a' as name, 2 as other"}

    with pytest.raises(ToolError, match="table target has no column other; its columns: id, name, price"):
        await run("transfer", source=source, target=place.end)
    data = (await run("transfer", source=source, target=place.end, on_drift="ignore")).data

    assert data["ignored"] == ["other"]
    assert place.rows() == [(1, "a", None)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verify": "checksum"}, "verify: checksum cannot compare the types"),
        ({"on_drift": "add"}, "on_drift: add is for tables of postgres and duckdb"),
        ({"resumable": "true"}, "resumable: true is for postgres and duckdb targets"),
    ],
)
async def test_options_that_it_has_not(run: Any, place: Place, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        await run("transfer", source=numbers(3), target=place.end, **fields)


async def test_two_statements_are_no_source(run: Any, place: Place) -> None:
    source = {**place.end, "table": "", "query": "select 1; select 2"}

    with pytest.raises(ToolError, match=r"source\.query needs one statement, it has 2"):
        await run("transfer", source=source, target=place.end)


async def test_instants_are_in_utc_in_mysql(run: Any, place: Place) -> None:
    if place.server is None or not place.server.is_real:
        pytest.skip("of MariaDB")
    place.execute("create table moments (at datetime, day date, doc json)")
    source = {
        "kind": "postgres",
        "query": "select '2026-03-01 12:00+02'::timestamptz as at, '2026-03-01'::date as day, '{\"a\": 1}'::jsonb as doc",
    }

    await run("transfer", source=source, target={**place.end, "table": "moments"})

    assert place.execute("select * from moments") == [(dt.datetime(2026, 3, 1, 10), dt.date(2026, 3, 1), '{"a":1}')]


async def test_values_that_do_not_fit_are_refused_in_mysql(run: Any, place: Place) -> None:
    if place.server is None or not place.server.is_real:
        pytest.skip("of MariaDB")
    source = {"kind": "postgres", "query": "select 1 as id, repeat('x', 21) as name"}

    with pytest.raises(ToolError, match="Data too long") as caught:
        await run("transfer", source=source, target=place.end)
    place.execute("create table unsafe (id int) engine = MyISAM")
    with pytest.raises(ToolError, match="has no transactions"):
        await run("transfer", source=numbers(1), target={**place.end, "table": "unsafe"}, on_drift="ignore")

    assert caught.value.kind == "db_constraint"
