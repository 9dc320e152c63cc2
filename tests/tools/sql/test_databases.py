"""The kinds sqlite and mysql, and SQLite through ADBC: statements, rows, errors, timeouts and cancellations."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pymysql.constants import FIELD_TYPE

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.tools.sql.databases.binding import bind, only_reads, split
from noetl_dagster.tools.sql.databases.mysql import MysqlDatabase, mysql_arguments
from tests.mysql import Server
from tests.tools.sql.test_adbc import SqliteOfAdbc, caller

Run = Callable[..., Any]
KINDS = ("sqlite", "mysql", "adbc")
PEOPLE = "create table people (id int primary key, name varchar(20) not null, note varchar(20) unique)"


@pytest.fixture(params=KINDS)
def sql(
    request: pytest.FixtureRequest, run: Run, box: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs SQL in a new database of each kind."""
    if request.param == "adbc":

        async def find(kind: str, box: ToolContext, **fields: Any) -> SqliteOfAdbc:
            return SqliteOfAdbc({"uri": f"file:{tmp_path}/own.sqlite"})

        monkeypatch.setattr("noetl_dagster.tools.sql.databases.tool.find_database", find)
        return caller(box)  # type: ignore[no-any-return]
    if request.param == "sqlite":
        fields: dict[str, Any] = {"database": "own.sqlite"}
    else:
        started: Server = request.getfixturevalue("mysql")
        fields = {"auth": {"type": "mysql", "url": started.url(started.new_database())}}

    async def run_sql(command: Any = None, **config: Any) -> Any:
        return await run(request.param, **fields, command=command, **config)

    return run_sql


async def test_results_are_shaped_as_those_of_postgres(sql: Run, request: pytest.FixtureRequest) -> None:
    result = await sql([PEOPLE, "insert into people values (1, 'a', null); select id, name, note from people"])

    assert result.data["command_0"] == {"status": "ok", "row_count": 0}
    changed = 0 if request.node.callspec.params["sql"] == "adbc" else 1  # whose driver of SQLite counts no changes
    assert result.data["command_1"] == {"status": "ok", "row_count": changed}
    assert result.data["rows"] == [{"id": 1, "name": "a", "note": None}]
    assert result.data["columns"] == ["id", "name", "note"]


async def test_two_columns_of_one_name_are_refused(run: Run) -> None:
    for form in ("rows", "table"):
        with pytest.raises(ToolError, match="two columns are named 'a'; rename one"):
            await run("sqlite", command="select 1 as a, 2 as b, 3 as a", **{"as": form})


async def test_values_of_sqlite(run: Run) -> None:
    rows = (
        await run("sqlite", command="create table t (ok boolean); insert into t values (true); select ok from t")
    ).data["rows"]
    assert rows == [{"ok": 1}]
    with pytest.raises(ToolError, match="row 2, column x: the value is an infinite number"):
        await run("sqlite", command="select 1.5 as x union all select 9e999")


def test_decimals_of_mysql_have_the_type_of_their_column() -> None:
    database = MysqlDatabase({})
    columns = [("d", FIELD_TYPE.NEWDECIMAL, None, 22, 22, 4, True), ("w", FIELD_TYPE.NEWDECIMAL, None, 12, 12, 0, True)]
    d, w = (database.converter(column, Numbers.TEXT) for column in columns)
    assert (d(Decimal("1.1000")), d(None), w(Decimal(7)), w(None)) == ("1.1000", None, 7, None)
    assert database.converter(columns[0], Numbers.FLOAT)(Decimal("1.1000")) == 1.1
    with pytest.raises(ToolError, match="beyond 64 bits"):
        w(Decimal(2**64))
    kinds = database.arrow_types([*columns, ("t", FIELD_TYPE.TIMESTAMP, None, 19, 19, 0, True)])
    assert {name: str(kind) for name, kind in kinds.items()} == {
        **{"d": "decimal128(38, 4)", "w": "decimal128(38, 0)", "t": "timestamp[us]"}
    }


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("select :a as x, :b as y, :a as z, ':a %' as t", {"a": 1, "b": "it's"}),
        ("select $1 as x, $2 as y, $1 as z, ':a %' as t", [1, "it's"]),
        ("select ? as x, ? as y, 1 as z, ':a %' as t", [1, "it's"]),
        ("select %s as x, %s as y, 1 as z, ':a %%' as t", [1, "it's"]),
        ("select %(a)s as x, %(b)s as y, %(a)s as z, ':a %%' as t -- :b", {"a": 1, "b": "it's"}),
    ],
)
async def test_parameters_in_every_spelling(sql: Run, text: str, params: Any) -> None:
    data = (await sql(text, params=params)).data

    assert data["rows"] == [{"x": 1, "y": "it's", "z": 1, "t": ":a %"}]


async def test_the_statements_of_a_call_are_one_transaction(sql: Run) -> None:
    await sql(PEOPLE)

    with pytest.raises(ToolError) as caught:
        await sql("insert into people values (1, 'a', 'x'); insert into people values (1, 'b', 'y')")

    assert caught.value.kind == "db_constraint"
    assert caught.value.code in ("1062", "SQLITE_CONSTRAINT_PRIMARYKEY", "INTEGRITY")
    assert (await sql("select count(*) as n from people")).data["rows"] == [{"n": 0}]


async def test_transactions_of_the_playbook_are_its_own(sql: Run) -> None:
    await sql(PEOPLE)

    await sql("begin; insert into people values (1, 'a', 'x'); commit; begin; delete from people; rollback")

    assert (await sql("select count(*) as n from people")).data["rows"] == [{"n": 1}]


async def test_many_rows_are_stored_in_chunks(sql: Run, box: ToolContext) -> None:
    text = "x" * 200
    await sql(PEOPLE.replace("varchar(20) not null", "varchar(300)"))
    values = ", ".join(f"({number}, '{text}', null)" for number in range(1500))
    await sql(f"insert into people values {values}")
    box.settings = box.settings.model_copy(update={"chunk_bytes": 1 << 16})

    ref = (await sql("select id, name from people order by id")).ref

    found = await box.results.get(ref)
    assert found["row_count"] == 1500
    assert [row["id"] for row in found["rows"]] == list(range(1500))


async def test_rows_as_a_table(sql: Run, box: ToolContext) -> None:
    await sql([PEOPLE, "insert into people values (1, 'a', null), (2, 'b', null)"])

    ref = (await sql("select id, name from people order by id", chunk_size=1, **{"as": "table"})).ref

    table = await box.results.get(ref)
    assert isinstance(table, pa.Table)
    assert table.to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


async def test_missing_values_and_statements(sql: Run) -> None:
    for config, message in [
        ({"command": "select ?", "params": []}, None),
        ({"command": "select $2", "params": [1]}, r"no value for \$2; 'params' has 1 values"),
        ({"command": " -- nothing"}, "has no SQL in 'command'"),
        ({"command": ["select 1", "select 2"], "as": "table"}, "a table is made of the rows of one statement"),
    ]:
        with pytest.raises(ToolError, match=message):
            await sql(**config)


async def test_values_without_a_type_of_the_database_are_text_or_json(sql: Run) -> None:
    await sql(PEOPLE.replace("(20)", "(100)"))

    await sql("insert into people values (:id, :name, :note)", params={"id": True, "name": {"a": [1]}, "note": [2.5]})

    assert (await sql("select * from people")).data["rows"] == [{"id": 1, "name": '{"a":[1]}', "note": "[2.5]"}]


async def test_a_timeout_stops_a_statement_of_sqlite(run: Run) -> None:
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select sum(i) from n"

    with pytest.raises(ToolError, match=r"took longer than its timeout of 0\.05 s") as caught:
        await run("sqlite", command=endless, timeout=0.05)

    assert caught.value.kind == "timeout"


async def test_a_cancelled_call_ends_its_statement_in_mysql(box: ToolContext, mysql: Server) -> None:
    database = mysql.new_database()
    config = {"command": "select sleep(3000)"}
    auth = {"type": "mysql", "url": mysql.url(database)}
    call = ToolCall(7001, "stage", Task(name="task_0", kind="mysql", config=config), config, {}, auth)
    known = await asyncio.to_thread(_connections, mysql)

    running = asyncio.ensure_future(tool_for("mysql").run(call, box))
    while mysql.is_real and await asyncio.to_thread(_connections, mysql) == known:
        assert not running.done()
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    while mysql.is_real and await asyncio.to_thread(_connections, mysql) != known:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _connections(server: Server) -> set[Any]:
    if not server.is_real:
        return set()
    found = server.execute("", "select id from information_schema.processlist where info like 'select sleep%'")
    return {row[0] for row in found}


async def test_claims_of_mysql_take_each_row_once(run: Run, mysql: Server) -> None:
    if not mysql.is_real:
        pytest.skip("of MariaDB: UPDATE ... LIMIT and variables")
    auth = {"type": "mysql", "url": mysql.url(mysql.new_database())}
    await run("mysql", auth=auth, command=[PEOPLE, "insert into people values (1, 'a', null), (2, 'b', null)"])
    claim = """
        set @claim = uuid();
        update people set name = substr(@claim, 1, 18) where length(name) = 1 order by id limit :most;
        select id from people where name = substr(@claim, 1, 18)
    """

    claims = [run("mysql", auth=auth, command=claim, params={"most": 1}) for _ in range(3)]
    found = [(await one).data["rows"] for one in [asyncio.ensure_future(claim) for claim in claims]]

    assert sorted(row["id"] for rows in found for row in rows) == [1, 2]


async def test_sqlite_in_memory_is_of_one_call(run: Run) -> None:
    await run("sqlite", command="create table t (a int)")

    with pytest.raises(ToolError, match="no such table: t") as caught:
        await run("sqlite", command="select * from t")

    assert caught.value.kind == "db"


async def test_sqlite_triggers_and_pragmas(run: Run, tmp_path: Path) -> None:
    trigger = (
        "create trigger copies after insert on a begin insert into b values (new.x); insert into b values (0); end"
    )
    commands = ["create table a (x); create table b (x);", trigger, "insert into a values (1); select x from b"]

    data = (await run("sqlite", command=commands, database="new/own.sqlite")).data
    mode = (await run("sqlite", command="pragma journal_mode = wal", database="new/own.sqlite")).data

    assert data["rows"] == [{"x": 1}, {"x": 0}]
    assert mode["rows"] == [{"journal_mode": "wal"}]
    assert (tmp_path / "new/own.sqlite").is_file()


async def test_a_template_cannot_lead_sqlite_out_of_its_folder(run: Run) -> None:
    task = Task(name="task_0", kind="sqlite", config={"database": "{{ name }}.sqlite"})

    with pytest.raises(ToolError, match="leaves its folder"):
        await run("sqlite", command="select 1", database="../other.sqlite", task=task)


async def test_a_file_that_is_no_database(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database at all, " * 100)

    with pytest.raises(ToolError, match="file is not a database") as caught:
        await run("sqlite", command="select * from t", database="text.sqlite")

    assert (caught.value.kind, caught.value.code) == ("db_connection", "SQLITE_NOTADB")


async def test_a_locked_file_is_reported_and_worth_another_try(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.tools.sql.databases.sqlite.BUSY_SECONDS", 0)
    await run("sqlite", command="create table t (a int)", database="own.sqlite")
    with sqlite3.connect(tmp_path / "own.sqlite", isolation_level=None) as other:
        other.execute("begin immediate")
        with pytest.raises(ToolError, match="database is locked") as caught:
            await run("sqlite", command="insert into t values (1)", database="own.sqlite")
        assert (await run("sqlite", command="select * from t", database="own.sqlite")).data["rows"] == []
    other.close()

    assert (caught.value.kind, caught.value.retryable) == ("db_timeout", True)


@pytest.mark.parametrize(
    ("url", "kind", "code"),
    [
        ("mysql://root:wrong@127.0.0.1:{port}/", "auth", "1045"),
        ("mysql://root:secret-of-root@127.0.0.1:1/", "db_connection", "2003"),
    ],
)
async def test_errors_of_connections_name_no_password(run: Run, mysql: Server, url: str, kind: str, code: str) -> None:
    auth = {"type": "mysql", "url": url.format(port=mysql.port)}

    with pytest.raises(ToolError) as caught:
        await run("mysql", command="select 1", auth=auth)

    assert (caught.value.kind, caught.value.code) == (kind, code)
    assert "secret-of-root" not in str(caught.value)


async def test_mysql_needs_a_credential(run: Run) -> None:
    with pytest.raises(ToolError, match="write auth: <name of a mysql credential>") as caught:
        await run("mysql", command="select 1")

    assert caught.value.kind == "credential"


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        (
            {"url": "mysql://me:s%40cret@db:3307/sales?sslmode=disable"},
            {"host": "db", "port": 3307, "user": "me", "password": "s@cret", "database": "sales", "ssl_disabled": True},
        ),
        (
            {"db_host": "db", "db_user": "me", "db_password": "p", "db_name": "sales"},
            {"host": "db", "port": 3306, "user": "me", "password": "p", "database": "sales"},
        ),
        ({"unix_socket": "/run/mysqld.sock"}, {"unix_socket": "/run/mysqld.sock", "port": 3306}),
    ],
)
def test_mysql_credentials(data: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert mysql_arguments(Credential("own", CredentialType.MYSQL, data)) == arguments


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"user": "me"}, "has neither 'url' nor 'host'"),
        ({"host": "db", "sslmode": "maybe"}, "sslmode 'maybe' is unknown"),
        ({"host": "db", "sslmode": "verify-ca", "ssl_ca": "/no/such.pem"}, "certificates cannot be read"),
        ({"url": "mysql://db:port/x"}, "no valid port"),
    ],
)
def test_mysql_credentials_that_are_wrong(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CredentialError, match=message):
        mysql_arguments(Credential("own", CredentialType.MYSQL, data))


@pytest.mark.parametrize(
    ("dialect", "text", "statements"),
    [
        (
            "mysql",
            r"select 'it\'s; :x'; select `a;b` # c;" + "\n; -- d;\n select 1",
            [r"select 'it\'s; :x'", "select `a;b` # c;", "-- d;\n select 1"],
        ),
        (
            "mysql",
            "create procedure p() begin select 1; select 2; end",
            ["create procedure p() begin select 1; select 2; end"],
        ),
        ("sqlite", "select [a;b]; begin; select ';'", ["select [a;b]", "begin", "select ';'"]),
        ("sqlite", "select 'never closed; select 2", ["select 'never closed; select 2"]),
        (
            "snowflake",
            "select $$a;b$$; select 'a\\';b' // c;\n; begin select 1; end",
            ["select $$a;b$$", "select 'a\\';b' // c;", "begin select 1; end"],
        ),
        ("bigquery", "select '''a;b'''; select `p.d`.t # c;", ["select '''a;b'''", "select `p.d`.t # c;"]),
    ],
)
def test_statements_of_a_dialect(dialect: str, text: str, statements: list[str]) -> None:
    assert [found for found, _ in split(text, dialect)] == statements


@pytest.mark.parametrize(
    ("dialect", "text", "params", "bound"),
    [
        ("mysql", r"select 'a\':x', `b:x`, :x, a->'$.x' -- :x", {"x": 1}, r"select 'a\':x', `b:x`, ?, a->'$.x' -- :x"),
        ("snowflake", "select c:x, d::x, :x", {"x": 1}, "select c:x, d::x, ?"),
        ("sqlite", "select [a:x], :y, :x", {"x": 1}, "select [a:x], :y, ?"),
        ("mysql", "select @v := 1, :x", {"x": 1}, "select @v := 1, ?"),
    ],
)
def test_parameters_of_a_dialect(dialect: str, text: str, params: Any, bound: str) -> None:
    assert [(one.text, one.values) for one in bind([text], params, dialect, "?")] == [(bound, (1,))]


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("select 1", True),
        ("(select 1)", True),
        ("with a as (select 1) select * from a", True),
        ("with a as (select 1) insert into t select * from a", False),
        ("select * into t from a", False),
        ("update t set a = 1 returning a", False),
        ("show tables", True),
    ],
)
def test_statements_that_only_read(text: str, reads: bool) -> None:
    assert only_reads(text) is reads
