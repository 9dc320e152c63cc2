"""Sinks: rows, modes, and one transaction with the completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import Sink
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import Toolbox
from noetl_dagster.tools.rows.batches import StoredResult, rows_of
from noetl_dagster.tools.sinks.postgres import is_event_log, write_result, write_sink

TABLE = """
create table out (
    id int primary key, name text, at timestamptz, price numeric, tags text[], extra jsonb, iter_index int
)
"""
ROW = {"id": 1, "name": "a", "at": "2026-01-02T00:00:00Z", "price": 1.5, "tags": ["x"], "extra": {"k": [1]}}


@pytest.fixture
async def table(pool: asyncpg.Pool) -> asyncpg.Pool:
    await pool.execute(TABLE)
    return pool


async def test_server_converts_json_to_its_types(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        await write_result(connection, Sink(table="public.out"), [ROW], {"iter_index": 4, "shard_id": "s"})

    [found] = await table.fetch("select * from out")
    assert (found["iter_index"], found["tags"], str(found["price"])) == (4, ["x"], "1.5")
    assert found["at"].year == 2026
    assert found["extra"] == {"k": [1]}


async def test_modes(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        await write_result(connection, Sink(table="out"), [ROW], {"iter_index": 1})
        with pytest.raises(asyncpg.UniqueViolationError):
            await write_result(connection, Sink(table="out"), [ROW], {})
        twice = [{"id": 1, "name": "b"}, {"id": 1, "name": "c"}, {"id": 2, "name": "d"}]
        await write_result(connection, Sink(table="out", mode="upsert"), twice, {"iter_index": 2})
        assert await connection.fetchval("select array_agg(name order by id) from out") == ["c", "d"]
        await write_result(connection, Sink(table="out", mode="replace"), [{"id": 9}], {"iter_index": 2})
        assert [row["id"] for row in await connection.fetch("select id from out")] == [9]


async def test_unknown_columns_and_missing_keys_are_errors(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        with pytest.raises(ToolError, match="no column nope"):
            await write_result(connection, Sink(table="out"), [{"id": 1, "nope": 2}], {})
        await connection.execute("create table bare (id int)")
        with pytest.raises(ToolError, match="needs 'key'"):
            await write_result(connection, Sink(table="bare", mode="upsert"), [{"id": 1}], {})
        with pytest.raises(ToolError, match="does not exist"):
            await write_result(connection, Sink(table="missing"), [{"id": 1}], {})


async def test_whole_rows_in_a_json_column(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        await connection.execute("create table raw (at timestamptz default now(), data jsonb)")
        await write_result(connection, Sink(table="raw"), [{"any": 1}, {"thing": 2}], {})
        assert await connection.fetchval("select data from raw where data ? 'thing'") == {"thing": 2}


async def test_command_with_arguments(table: asyncpg.Pool) -> None:
    sink = Sink(
        command="insert into out (id, name, iter_index) values (:id, :name, :iter_index)",
        args={"id": "5", "name": 7},
    )
    async with table.acquire() as connection:
        await write_result(connection, sink, None, {"iter_index": 3})

    [found] = await table.fetch("select id, name, iter_index from out")
    assert dict(found) == {
        "id": 5,
        "name": "7",
        "iter_index": 3,
    }


@pytest.mark.parametrize(
    "fields",
    [{"table": "out"}, {"command": "insert into out select * from jsonb_to_recordset(:result) as r(id int)"}],
)
async def test_a_stored_result_may_take_long_to_read(table: asyncpg.Pool, box: Toolbox, fields: dict[str, str]) -> None:
    [database] = await table.fetchrow("select quote_ident(current_database())")
    await table.execute(f"alter database {database} set idle_in_transaction_session_timeout = 200")
    rows = [{"id": 1}, {"id": 2}]

    async def parts() -> AsyncIterator[Any]:
        await asyncio.sleep(0.6)
        yield rows

    async def whole() -> Any:
        await asyncio.sleep(0.6)
        return rows

    await write_sink(box, Sink(auth="main", **fields), StoredResult(parts, whole), {})

    assert [row["id"] for row in await table.fetch("select id from out order by id")] == [1, 2]


async def test_sink_and_completion_are_one_transaction(table: asyncpg.Pool, box: Toolbox) -> None:
    sink = Sink(table="out", auth="{{ where }}", args={"id": "{{ result.id }}", "name": "{{ who }}"})
    scope = {"where": "main", "who": "me", "result": {"id": 3}}

    async def fail(connection: asyncpg.Connection) -> None:
        raise asyncpg.SerializationError("completion failed")

    async def complete(connection: asyncpg.Connection) -> None:
        await connection.execute("insert into out (id) values (100)")

    with pytest.raises(ToolError):
        await write_sink(box, sink, {"id": 3}, scope, complete=fail)
    assert await table.fetchval("select count(*) from out") == 0

    assert await write_sink(box, sink, {"id": 3}, scope, complete=complete)

    assert [row["id"] for row in await table.fetch("select id from out order by id")] == [3, 100]


def test_rows_inside_results() -> None:
    rows = [{"a": 1}]

    for value in (
        rows,
        {"rows": rows, "row_count": 1},
        {"status_code": 200, "data": {"data": rows}},
        {"a": 1},
    ):
        assert rows_of(value) == rows
    assert rows_of([1]) == [{"value": 1}]
    assert rows_of(None) == []


async def test_event_log_is_recognised(box: Toolbox) -> None:
    own = Credential("x", CredentialType.POSTGRES, {"url": box.settings.db_url})
    other = Credential("y", CredentialType.POSTGRES, {"host": "elsewhere", "database": "d"})

    assert is_event_log(own, box.settings)
    assert not is_event_log(other, box.settings)
