"""Sinks: rows, modes, and one transaction with the completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import Sink
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.batches import StoredResult, rows_of
from noetl_dagster.tools.sinks.postgres import CompletingEvents, is_event_log, write_result, write_sink

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


async def test_text_has_the_meaning_that_it_has_as_a_parameter(table: asyncpg.Pool) -> None:
    moment = "2026-01-02T23:00:00-05:00"
    async with table.acquire() as connection:
        await connection.execute("create table typed (id int, b bytea, t timestamp, d date)")
        row = {"id": 1, "b": "YWI=", "t": moment, "d": moment}
        await write_result(
            connection, Sink(table="typed"), [row, {"id": 2, "t": "2026-01-02 23:00", "d": "0044-03-15 BC"}], {}
        )
        found = await connection.fetch("select b, t::text, d::text from typed order by id")
        assert [tuple(each) for each in found] == [
            (b"ab", "2026-01-03 04:00:00", "2026-01-03"),
            (None, "2026-01-02 23:00:00", "0044-03-15 BC"),
        ]
        with pytest.raises(ToolError, match="row 2, column b: bytes are base64 text"):
            await write_result(connection, Sink(table="typed"), [row, {**row, "b": "?"}], {})


def test_rows_have_the_order_of_their_columns() -> None:
    result = {"rows": [{"a": 1, "zz": 2}, {"a": 3, "zz": 4}], "columns": ["zz", "a"], "row_count": 2}
    assert [list(row.items()) for row in rows_of(result)] == [[("zz", 2), ("a", 1)], [("zz", 4), ("a", 3)]]


async def columns_of(table: asyncpg.Pool, name: str) -> dict[str, str]:
    query = "select column_name, udt_name from information_schema.columns where table_name = $1"
    return dict(await table.fetch(query, name))


async def test_new_columns_are_added_with_the_type_of_all_values(table: asyncpg.Pool) -> None:
    rows = [
        {"id": 1, "n": 1, "x": 1, "big": 1, "ok": True, "doc": {"a": 1}, "mixed": 1, "none": None, "Strange.name": "s"},
        {"id": 2, "n": None, "x": 2.5, "big": 2**63, "list": [1, "a"], "mixed": "b"},
    ]
    sink = Sink(table="out", on_new_column="add")
    async with table.acquire() as connection, connection.transaction():
        await write_result(connection, sink, rows, {"iter_index": 0, "shard_id": "s"})
    types = await columns_of(table, "out")
    assert {name: types[name] for name in types if name not in {*ROW, "iter_index"}} == {
        **{"n": "int8", "x": "float8", "big": "numeric", "ok": "bool", "doc": "jsonb", "list": "jsonb"},
        **{"mixed": "text", "none": "text", "Strange.name": "text"},
    }
    found = await table.fetch('select x, big, mixed, list, "Strange.name", iter_index from out order by id')
    assert [tuple(map(str, row)) for row in found] == [
        ("1.0", "1", "1", "None", "s", "0"),
        ("2.5", str(2**63), "b", "[1, 'a']", "None", "0"),
    ]


async def test_new_columns_are_ignored_or_refused(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        await write_result(connection, Sink(table="out", on_new_column="ignore"), [{"id": 1, "new": 2}], {})
        for word in (None, "fail", "error"):
            with pytest.raises(ToolError, match=r"has no column new; .* Write on_new_column: add or ignore"):
                await write_result(connection, Sink(table="out", on_new_column=word), [{"id": 2, "new": 2}], {})
        with pytest.raises(ToolError, match="none of its columns"):
            await write_result(connection, Sink(table="out", on_new_column="ignore"), [{"new": 2}], {})
        with pytest.raises(ToolError, match="on_new_column: 'widen' is unknown; write add, ignore or fail"):
            await write_result(connection, Sink(table="out", on_new_column="widen"), [{"id": 2}], {})
        assert await connection.fetch("select id from out") == [(1,)]
    assert "new" not in await columns_of(table, "out")


async def test_two_workers_add_the_same_column(table: asyncpg.Pool) -> None:
    sink = Sink(table="out", on_new_column="add")
    async with table.acquire() as first, table.acquire() as second:
        one = first.transaction()
        await one.start()
        await write_result(first, sink, [{"id": 1, "new": 1}], {})

        async def other() -> None:
            async with second.transaction():
                await write_result(second, sink, [{"id": 2, "new": 2, "more": "x"}], {})

        writing = asyncio.create_task(other())
        waits = "select count(*) from pg_stat_activity where pid = $1 and wait_event_type = 'Lock'"
        while not await table.fetchval(waits, second.get_server_pid()):
            assert not writing.done()
        await one.commit()
        await writing
    assert [tuple(row) for row in await table.fetch("select id, new, more from out order by id")] == [
        (1, 1, None),
        (2, 2, "x"),
    ]


async def test_a_failed_transaction_adds_no_column(table: asyncpg.Pool, box: ToolContext) -> None:
    async def fail(connection: asyncpg.Connection) -> None:
        raise ToolError("ended by another worker", kind="claim")

    sink = Sink(table="out", auth="embedded", on_new_column="add")
    with pytest.raises(ToolError, match="another worker"):
        await write_sink(box, sink, [{"id": 1, "new": 1}], {}, complete=fail)
    assert "new" not in await columns_of(table, "out")
    await write_sink(box, sink, [{"id": 1, "new": 1}], {})
    assert (await columns_of(table, "out"))["new"] == "int8"


async def test_whole_rows_in_a_json_column(table: asyncpg.Pool) -> None:
    async with table.acquire() as connection:
        await connection.execute("create table raw (at timestamptz default now(), data jsonb)")
        rows = [{"any": 1}, {"thing": 2}, {"value": [3]}]
        await write_result(connection, Sink(table="raw"), rows, {})
        assert await connection.fetchval("select data from raw where data ? 'thing'") == {"thing": 2}
        assert await connection.fetchval("select data from raw where jsonb_typeof(data) = 'array'") == [3]


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
async def test_a_stored_result_may_take_long_to_read(
    table: asyncpg.Pool, box: ToolContext, fields: dict[str, str]
) -> None:
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


async def test_sink_and_completion_are_one_transaction(table: asyncpg.Pool, box: ToolContext) -> None:
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


async def test_event_log_is_recognised(box: ToolContext) -> None:
    own = Credential("x", CredentialType.POSTGRES, {"url": box.settings.db_url})
    other = Credential("y", CredentialType.POSTGRES, {"host": "elsewhere", "database": "d"})

    assert is_event_log(own, box.settings)
    assert not is_event_log(other, box.settings)


async def test_a_table_that_has_changed_is_described_again(box: ToolContext, pool: asyncpg.Pool) -> None:
    await pool.execute("CREATE TABLE changing (id int, iter_index int)")
    sink = Sink(tool="postgres", auth="embedded", table="changing")
    await write_sink(box, sink, [{"id": 1}], {}, identity={"iter_index": 1})
    await pool.execute("ALTER TABLE changing DROP COLUMN iter_index, ADD COLUMN note text")
    await write_sink(box, sink, [{"id": 2}], {}, identity={"iter_index": 2})
    await write_sink(box, sink, [{"id": 3, "note": "new"}], {}, identity={"iter_index": 3})
    rows = await pool.fetch("SELECT id, note FROM changing ORDER BY id")
    assert [tuple(row) for row in rows] == [(1, None), (2, None), (3, "new")]


class End(CompletingEvents):
    """The completion of a command."""

    def __init__(self, pool: asyncpg.Pool, execution_id: int, command: str) -> None:
        self.log = EventLog(pool, Snowflake(1))
        meta = {"command_id": command}
        self.event = Event(execution_id, self.log.ids.next(), EventType.COMMAND_COMPLETED, node_name="s", meta=meta)

    async def events(self) -> list[Event]:
        return [self.event]

    def check(self, new: Set[int]) -> None:
        if self.event.event_id not in new:
            raise ToolError("another worker", kind="claim")

    async def __call__(self, connection: Any) -> None:
        raise AssertionError("rows and end take one statement")


@pytest.mark.parametrize("mode", ["append", "upsert"])
async def test_rows_come_with_the_end_that_the_log_takes(box: ToolContext, table: asyncpg.Pool, mode: str) -> None:
    sink = Sink(table="out", auth="embedded", mode=mode)
    assert await write_sink(box, sink, {"id": 1}, {}, complete=End(table, 7, "first"))
    with pytest.raises(ToolError, match="another worker"):
        await write_sink(box, sink, {"id": 2}, {}, complete=End(table, 7, "first"))
    await table.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_type, meta) VALUES (7, 1, 'execution.cancelled', '{}')"
    )
    with pytest.raises(ToolError, match="another worker"):
        await write_sink(box, sink, {"id": 3}, {}, complete=End(table, 7, "third"))
    assert [row["id"] for row in await table.fetch("SELECT id FROM out")] == [1]
    assert await table.fetchval("SELECT count(*) FROM noetl.event WHERE event_type = 'command.completed'") == 1


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (TimeoutError(), "sink: the server did not answer in time", "db_timeout"),
        (ConnectionError("unexpected connection_lost() call"), "sink: the connection to the server was lost", "db_connection"),
        (ConnectionResetError(104, "Connection reset by peer"), "sink: the connection to the server was lost", "db_connection"),
        (asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
         "sink: the connection to the server was lost (SQLSTATE 08003)", "db_connection"),
        (asyncpg.InterfaceError("connection is closed"), "sink: the connection to the server was lost", "db_connection"),
        (asyncpg.InterfaceError("pool is closing"), "sink: the connection to the server was lost", "db_connection"),
        (ConnectionRefusedError(111, "Connect call failed"), "sink: the server cannot be reached", "db_connection"),
        (asyncpg.InterfaceError("another operation is in progress"), "another operation is in progress", "db"),
    ],
)  # fmt: skip
async def test_a_lost_connection_in_plain_words(
    table: asyncpg.Pool, box: ToolContext, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, kind: str
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("noetl_dagster.tools.sinks.postgres.write_result", fail)
    with pytest.raises(ToolError) as caught:
        await write_sink(box, Sink(table="out", auth="embedded"), [ROW], {})
    assert message in str(caught.value)
    assert (caught.value.kind, caught.value.retryable) == (kind, kind != "db")
