"""The postgres tool against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import ToolError


async def test_several_statements_and_the_promoted_rows(run: Any) -> None:
    sql = """
        create table t (id int, name text);
        insert into t values (1, 'a'), (2, ';');
        select * from t order by id
    """

    data = (await run("postgres", command=sql)).data

    rows = [{"id": 1, "name": "a"}, {"id": 2, "name": ";"}]
    assert data["command_0"] == {"status": "ok", "row_count": 0}
    assert data["command_1"] == {"status": "ok", "row_count": 2}
    assert data["command_2"] == {"status": "ok", "rows": rows, "row_count": 2, "columns": ["id", "name"]}
    assert (data["rows"], data["row_count"], data["columns"]) == (rows, 2, ["id", "name"])


async def test_task_is_one_transaction(run: Any, pool: asyncpg.Pool) -> None:
    await pool.execute("create table t (id int primary key)")

    with pytest.raises(ToolError) as caught:
        await run("postgres", command="insert into t values (1); insert into t values (1)")

    assert await pool.fetchval("select count(*) from t") == 0
    assert caught.value.details["pg"]["sqlstate"] == "23505"
    assert not caught.value.retryable


async def test_statements_that_refuse_transactions(run: Any, pool: asyncpg.Pool) -> None:
    await run("postgres", command="create table t (id int); vacuum t; create index concurrently i on t (id)")

    assert await pool.fetchval("select count(*) from pg_indexes where indexname = 'i'") == 1


async def test_explicit_transaction_does_not_leak(run: Any, pool: asyncpg.Pool) -> None:
    with pytest.raises(ToolError):
        await run("postgres", command="begin; create table leak (id int); select 1 / 0; commit")

    assert await pool.fetchval("select to_regclass('leak')") is None
    assert (await run("postgres", command="select 1 as one")).data["rows"] == [{"one": 1}]


@pytest.mark.parametrize(
    ("type_name", "given", "expected"),
    [
        ("int", "3", 3),
        ("text", 3, "3"),
        ("text", {"a": 1}, '{"a":1}'),
        ("bool", "no", False),
        ("float8", "1.5", 1.5),
        ("numeric", "10.50", "10.50"),
        ("numeric", "12345678901234567890.12", "12345678901234567890.12"),
        ("numeric", 3, "3"),
        ("numeric", "NaN", None),
        ("numeric[]", [1.5, "1234567890123456.7891"], ["1.5", "1234567890123456.7891"]),
        ("float4", 3.4, 3.4),
        ("float8", "nan", None),
        ("date", "2026-01-02", "2026-01-02"),
        ("date", "9999-12-31", "9999-12-31"),
        ("date", "0001-01-01", "0001-01-01"),
        ("date", "-infinity", "-infinity"),
        ("date", "2026-01-02T23:00:00-05:00", "2026-01-03"),
        ("timestamp", "2026-01-02T23:00:00-05:00", "2026-01-03T04:00:00"),
        ("timestamp", "infinity", "infinity"),
        ("timestamptz", "-infinity", "-infinity"),
        ("timetz", "01:02:03+02:00", "01:02:03+02:00"),
        ("text::interval", "1 mon 2 days 00:00:00.5", "1 mon 2 days 00:00:00.5"),
        ("bytea", "\\x6162", "YWI="),
        ("timestamptz", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05+00:00"),
        ("timestamp", "2026-01-02 03:04:05", "2026-01-02T03:04:05"),
        ("interval", 90, "00:01:30"),
        ("uuid", "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000001"),
        ("jsonb", {"a": [1, None]}, {"a": [1, None]}),
        ("jsonb", '{"a": 1}', {"a": 1}),
        ("jsonb", "text", "text"),
        ("json", [1, "x"], [1, "x"]),
        ("bytea", "YWI=", "YWI="),
        ("int[]", ["1", 2], [1, 2]),
        ("text[]", '["a", null]', ["a", None]),
        ("inet", "10.0.0.1", "10.0.0.1"),
        ("int4range", None, None),
    ],
)
async def test_parameters_and_columns_of_every_type(run: Any, type_name: str, given: Any, expected: Any) -> None:
    for _ in range(2):  # prepared anew, then from the cache
        data = (await run("postgres", command=f"select :value::{type_name} as value", params={"value": given})).data
        assert data["rows"] == [{"value": expected}]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select 1 as a, 2 as b, 3 as a", r"two columns are named 'a'; rename one: SELECT \.\.\. AS other"),
        (
            "select case n when 3 then 'inf'::float8 else n end as x from generate_series(1, 3) n",
            "row 3, column x: .*inf",
        ),
        ("select '-infinity'::numeric as d", "row 1, column d: .*infinite"),
        ("""select '{"a": [1, 1234567890123456.7891]}'::jsonb""", r"a column has .*a\[1\] is 1234567890123456\.7891"),
        ("select '0044-03-15 BC'::timestamp", "a column has a value that cannot be read"),
        ("select :v::jsonb", "command_0.*is not a value of type jsonb"),
        ("select :v::bytea", "not a value of type bytea"),
        ("select :v::timestamp", "not a value of type timestamp"),
    ],
)
async def test_values_without_a_form_are_refused_with_their_place(run: Any, sql: str, message: str) -> None:
    for size in (None, 1):
        with pytest.raises(ToolError, match=message):
            await run(
                "postgres", command=sql, params={"v": "[1, 2"} if ":v" in sql else {}, chunk_size=size, **{"as": "rows"}
            )


async def test_decimals_are_doubles_if_a_call_asks_for_it(run: Any) -> None:
    sql = "select 1.5::numeric as a, null::numeric as b, 2.50 as c"
    rows = [(await run("postgres", command=sql, numbers=numbers)).data["rows"] for numbers in ("float", "text", None)]
    assert rows == [[{"a": 1.5, "b": None, "c": 2.5}], *2 * [[{"a": "1.5", "b": None, "c": "2.50"}]]]
    with pytest.raises(ToolError, match="numbers: 'exact' is unknown; write text or float"):
        await run("postgres", command=sql, numbers="exact")


async def test_dates_before_year_1_are_those_of_the_server(run: Any) -> None:
    data = (await run("postgres", command="select '0044-03-15 BC'::date as a, '20000-01-01'::date as b")).data
    assert data["rows"] == [{"a": "0044-03-15 BC", "b": "20000-01-01"}]


async def test_input_binds_when_there_are_no_params(run: Any) -> None:
    assert (await run("postgres", command="select :n::int + 1 as m", input={"n": 1})).data["rows"] == [{"m": 2}]
    assert (await run("postgres", command="select $1::int as m", params=[5])).data["rows"] == [{"m": 5}]


async def test_wrong_parameter_names_the_statement_and_the_type(run: Any) -> None:
    with pytest.raises(ToolError, match=r"command_0: parameter \$1: 'x' is not a value of type int4"):
        await run("postgres", command="select :n::int", params={"n": "x"})


async def test_columns_of_an_empty_result(run: Any) -> None:
    for _ in range(2):
        data = (await run("postgres", command="select 1 as a, 'x' as b where false")).data
        assert (data["rows"], data["columns"]) == ([], ["a", "b"])


async def test_altered_table_is_read_anew(run: Any, pool: asyncpg.Pool) -> None:
    await pool.execute("create table t (id int); insert into t values (1)")
    sql = "select 1; select * from t"
    assert (await run("postgres", command=sql)).data["rows"] == [{"id": 1}]
    await pool.execute("alter table t add column price numeric default 1.5")

    assert (await run("postgres", command=sql)).data["rows"] == [{"id": 1, "price": "1.5"}]


async def test_serialisation_failures_and_lost_connections_are_retryable(run: Any) -> None:
    for state in ("40001", "40P01", "57P01"):
        with pytest.raises(ToolError) as caught:
            await run("postgres", command=f"do $$ begin raise exception 'x' using errcode = '{state}'; end $$")
        assert caught.value.retryable
        assert caught.value.code == state
    with pytest.raises(ToolError) as lost:
        await run("postgres", command="select pg_terminate_backend(pg_backend_pid())")
    assert lost.value.retryable
    assert (await run("postgres", command="select 1 as one")).data["rows"] == [{"one": 1}]


async def test_psycopg_placeholders(run: Any) -> None:
    listed = await run(
        "postgres",
        command="select %s::int + 1 as n, 7 %% 4 as rest; select (%s || ' days')::interval as i, 'a%%' as t",
        params=[1, 2],
    )
    named = await run("postgres", command="select %(who)s as who where %(n)s > 1", params={"who": "O'Hara", "n": 2})
    plain = await run("postgres", command="select 7 % 4 as rest, 'a%%' as t, to_char(1, '%s') is null as b")

    assert listed.data["command_0"]["rows"] == [{"n": 2, "rest": 3}]
    assert listed.data["command_1"]["rows"][0]["t"] == "a%"
    assert named.data["rows"] == [{"who": "O'Hara"}]
    assert plain.data["rows"] == [{"rest": 3, "t": "a%%", "b": False}]


async def test_script_file(run: Any, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("select :n::int as n;")

    assert (await run("postgres", script="q.sql", input={"n": 4})).data["rows"] == [{"n": 4}]


async def test_missing_credential_names_the_places(run: Any, box: Any) -> None:
    box.credentials._settings = box.settings.model_copy(update={"default_postgres_credential": None})

    with pytest.raises(ToolError, match=r"NOETL_CREDENTIAL_MAIN_DB.*noetl\.credential"):
        await run("postgres", command="select 1", auth="main_db")


async def test_many_calls_share_a_small_pool(run: Any, pool: asyncpg.Pool) -> None:
    calls = [run("postgres", command="select :n::int as n", input={"n": n}) for n in range(100)]

    results = await asyncio.gather(*calls)

    assert [result.data["rows"][0]["n"] for result in results] == list(range(100))


async def test_large_results_are_streamed_into_a_reference(run: Any, box: Any) -> None:
    columns = "n as id, n * 1.5 as price, case when n > 3000 then 'late' end as note"
    sql = f"select {columns} from generate_series(1, 5000) as n"

    result = await run("postgres", command=sql, chunk_size=1000)

    table = await box.results.get(result.ref)
    assert (table.num_rows, table.column_names) == (5000, ["id", "price", "note"])
    assert result.ref.rows == 5000
    assert table.column("note").to_pylist()[-1] == "late"
    with pytest.raises(ToolError, match="of one statement"):
        await run("postgres", command="select 1; select 2", chunk_size=10)
