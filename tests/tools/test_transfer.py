"""Transfers between real stores."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from noetl_dagster.errors import TemplateError, ToolError
from noetl_dagster.tools.base import ToolContext
from tests.serving import served
from tests.waiting import until

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
NOWHERE = {"kind": "http", "url": "http://127.0.0.1:1/"}


async def test_postgres_to_postgres_keeps_every_type(run: Any, source: asyncpg.Pool) -> None:
    data = (await run("transfer", source={"kind": "postgres", "table": "source"}, target=PG, chunk_size=1000)).data

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


async def test_more_transfers_at_once_than_the_pool_has_connections(run: Any, source: asyncpg.Pool) -> None:
    await source.execute("alter table target drop constraint target_pkey")
    calls = [run("transfer", source={"kind": "postgres", "table": "source"}, target=PG) for _ in range(20)]

    transfers = [asyncio.create_task(call) for call in calls]
    await until(lambda: all(one.done() for one in transfers), "all of them")

    assert [(await one).data["rows"] for one in transfers] == [2500] * 20
    assert await source.fetchval("select count(*) from target") == 20 * 2500


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
    lines = {"type": "application/x-ndjson", "body": '{"id": 1, "name": "a"}\n{"id": 2, "name": null}\n'}
    await run("transfer", source={"kind": "http", "url": f"{server}/as", "params": lines, "format": "jsonl"}, target=PG)
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


async def test_an_array_larger_than_memory_may_hold(
    run: Any, box: ToolContext, server: str, pool: asyncpg.Pool
) -> None:
    box.settings = box.settings.model_copy(update={"http_body_bytes": 1_000_000})
    source = {"kind": "http", "url": f"{server}/rows", "params": {"as": "json", "count": 3000}}
    await pool.execute("create table target (id int, text text)")

    data = (await run("transfer", source=source, target=PG, chunk_size=500)).data
    assert (data["rows"], await pool.fetchval("select sum(id) from target")) == (3000, 2999 * 1500)
    broken = {**source, "params": {"as": "json", "count": 3000, "end": ""}}
    with pytest.raises(ToolError, match=r"from byte [1-9]\d* on: no JSON array"):
        await run("transfer", source=broken, target=PG, mode="replace", chunk_size=500)
    assert await pool.fetchval("select count(*) from target") == 3000


async def test_a_value_of_an_array_may_be_as_large_as_the_file(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'[{"id": 1, "name": "' + b"x" * (34 << 20) + b'"}, {"id": 2}]')
    await pool.execute("create table wide (id int, name text)")
    target = {"kind": "postgres", "table": "wide"}

    await run("transfer", source={"path": "rows.json"}, target=target)

    found = await pool.fetch("select id, length(name) from wide order by id")
    assert [tuple(row) for row in found] == [(1, 34 << 20), (2, None)]
    with pytest.raises(ToolError, match="more than 33554432 bytes"):
        await run("transfer", source={"path": "rows.json", "format": "json"}, target=target)


async def test_json_that_is_no_array_is_one_row(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"id": 1, "text": "[a"}')
    await pool.execute("create table target (id int, text text)")

    await run("transfer", source={"path": "one.json"}, target=PG)

    assert [tuple(row) for row in await pool.fetch("select * from target")] == [(1, "[a")]


ODD = [
    {"id": 1, "name": "", "note": 'a "quoted", \\ back\nslash\ttab', "tags": ["x", None, 'y"z'], "n": 1.5},
    {"id": 2, "name": None, "note": "\\N", "tags": [], "n": float("nan")},
    {"id": 3, "name": "\\.", "note": "NULL", "tags": None, "n": float("-inf")},
]


async def test_arrow_and_rows_come_out_the_same(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    await pool.execute("create table odd (id int, name text, note text, tags text[], n float8, at timestamptz)")
    at = dt.datetime(2026, 3, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    rows = [{**row, "at": at} for row in ODD]
    kind = pa.timestamp("us", "Europe/Berlin")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table({**columns, "at": pa.array(columns["at"], kind)}), tmp_path / "odd.parquet")

    await run("transfer", source={"path": "odd.parquet"}, target={"kind": "postgres", "table": "odd"})

    found = [dict(row) for row in await pool.fetch("select * from odd order by id")]
    assert repr(found) == repr([{**row, "at": at.astimezone(dt.UTC)} for row in rows])


async def test_json_lines_keep_json_and_null(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    await pool.execute("create table odd (id int, doc jsonb, raw bytea, ok bool)")
    lines = [
        {"id": 1, "doc": {"a": [1, None]}, "raw": "AP8=", "ok": True},
        {"id": 2, "doc": True, "raw": None, "ok": None},
        {"id": 3, "doc": "text", "raw": "", "ok": False},
        {"id": 4, "doc": None, "raw": None, "ok": None},
    ]
    (tmp_path / "odd.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))

    await run("transfer", source={"path": "odd.jsonl"}, target={"kind": "postgres", "table": "odd"})

    found = [tuple(row) for row in await pool.fetch("select * from odd order by id")]
    assert found == [
        (1, {"a": [1, None]}, b"\x00\xff", True),
        (2, True, None, None),
        (3, "text", b"", False),
        (4, None, None, None),
    ]


async def test_csv_of_any_shape(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    """Quotes with line ends in them at the edges of blocks, a byte order mark, an empty value at the end."""
    await pool.execute("create table odd (id int, note text)")
    note = 'line\nend, "quote" ' + "x" * 500
    long = "".join(f'{n},"{note.replace(chr(34), chr(34) * 2)}"\r\n' for n in range(1, 5001))
    (tmp_path / "odd.csv").write_bytes(b"\xef\xbb\xbfid,note\r\n" + long.encode() + b"5001,\r\n")

    result = (await run("transfer", source={"path": "odd.csv"}, target={"kind": "postgres", "table": "odd"})).data

    assert result["rows"] == 5001
    assert await pool.fetchval("select count(*) from odd where note = $1", note) == 5000
    assert await pool.fetchval("select note from odd where id = 5001") is None


async def test_another_type_is_converted_by_the_server(run: Any, pool: asyncpg.Pool) -> None:
    await pool.execute("create table a as select n as id, n::text as price from generate_series(1, 5) as n")
    await pool.execute("create table b (price numeric(10, 2), id bigint)")

    await run("transfer", source={"kind": "postgres", "table": "a"}, target={"kind": "postgres", "table": "b"})

    assert await pool.fetchval("select sum(price) from b") == 15
    await pool.execute("insert into a values (6, 'six')")
    with pytest.raises(ToolError, match=r"column price.*six|six.*column price|invalid input.*six"):
        await run("transfer", source={"kind": "postgres", "table": "a"}, target={"kind": "postgres", "table": "b"})
    assert await pool.fetchval("select count(*) from b") == 5


LATER = '{"id": 1}\n{"id": 2}\n{"id": 3, "age": 40, "doc": {"a": 1}}\n{"id": 4, "ok": true}\n'


async def test_drift_is_an_error_that_names_columns_and_remedy(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    await pool.execute("create table t (id int)")
    (tmp_path / "in.jsonl").write_text(LATER)

    with pytest.raises(ToolError, match=r"no column age, doc.*on_drift: add or ignore"):
        await run(
            "transfer",
            source={"path": "in.jsonl"},
            target={"kind": "postgres", "table": "t"},
            chunk_size=1,
        )

    assert await pool.fetchval("select count(*) from t") == 0


@pytest.mark.parametrize("kind", ["postgres", "duckdb"])
async def test_drift_is_ignored_or_added(run: Any, pool: asyncpg.Pool, tmp_path: Path, kind: str) -> None:
    (tmp_path / "in.jsonl").write_text(LATER)
    target = {"kind": "postgres", "table": "t"}
    if kind == "duckdb":
        target = {"kind": "duckdb", "database": "own.db", "table": "t"}
        (tmp_path / "first.jsonl").write_text('{"id": 0}')
        await run("transfer", source={"path": "first.jsonl"}, target=target)
    else:
        await pool.execute("create table t (id int, made text default 'here')")

    given = {"source": {"path": "in.jsonl"}, "target": target, "chunk_size": 1}
    ignored = (await run("transfer", **given, on_drift="ignore")).data
    mode = "append" if kind == "duckdb" and duckdb.__version__ < "2" else "replace"
    if mode == "append":
        with pytest.raises(ToolError, match="another transaction has altered this table"):
            await run("transfer", **given, on_drift="add", mode="replace")
        with duckdb.connect(str(tmp_path / "own.db")) as connection:
            assert connection.execute("delete from t").fetchall() == [(5,)]  # as before
    added = (await run("transfer", **given, on_drift="add", mode=mode)).data

    assert ignored["ignored"] == ["age", "doc", "ok"]
    assert added["added"] == ["age", "doc", "ok"]
    select = "select id, age, doc, ok from t order by id"
    if kind == "duckdb":
        rows = duckdb.connect(str(tmp_path / "own.db")).execute(select).fetchall()
        assert [(a, b, c and orjson.loads(c), d) for a, b, c, d in rows] == ADDED
    else:
        assert [tuple(row) for row in await pool.fetch(select)] == ADDED
        assert await pool.fetchval("select count(*) from t where made = 'here'") == 4


ADDED = [(1, None, None, None), (2, None, None, None), (3, 40, {"a": 1}, None), (4, None, None, True)]


async def test_an_added_column_has_the_type_of_its_source(run: Any, source: asyncpg.Pool) -> None:
    await source.execute("create table narrow (id int)")

    data = (
        await run(
            "transfer",
            source={"kind": "postgres", "table": "source"},
            target={"kind": "postgres", "table": "narrow"},
            on_drift="add",
            verify="checksum",
        )
    ).data

    assert data["added"] == ["name", "price", "at", "tags", "extra", "raw", "took", "even", "uid"]
    assert data["checksum"].startswith("2500:")
    assert await source.fetchval(SAME.replace("from target", "from narrow")) == 0


async def test_a_trigger_that_keeps_rows_away_is_noticed(run: Any, source: asyncpg.Pool) -> None:
    await source.execute(
        """
        create function odd_only() returns trigger language plpgsql as
          $$begin return case when new.id % 2 = 1 then new end; end$$;
        create trigger t before insert on target for each row execute function odd_only()
        """
    )
    whole = {"source": {"kind": "postgres", "table": "source"}, "target": PG}

    with pytest.raises(ToolError, match=r"2500 rows were read, and table .* took 1250"):
        await run("transfer", **whole)
    assert await source.fetchval("select count(*) from target") == 0

    data = (await run("transfer", **whole, verify="none")).data
    assert data["verified"] == {"by": "none"}
    assert await source.fetchval("select count(*) from target") == 1250


async def test_a_parquet_file_says_what_it_holds(run: Any, source: asyncpg.Pool, tmp_path: Path) -> None:
    rows = {"kind": "postgres", "table": "source"}
    data = (await run("transfer", source=rows, target={"path": "out.parquet"})).data

    whole = (tmp_path / "out.parquet").read_bytes()
    assert data["checksum"] == f"sha256:{hashlib.sha256(whole).hexdigest()}"
    assert data["verified"] == {"by": "rows", "read": 2500, "written": 2500, "bytes": len(whole)}


@pytest.fixture
def pages() -> Iterator[str]:
    """Ten rows, three a page, by every kind of paging."""

    async def rows(request: Request) -> JSONResponse:
        how, given = request.path_params["how"], dict(request.query_params)
        start = {"number": lambda: (int(given["page"]) - 1) * 3, "offset": lambda: int(given["offset"])}
        begin = start[how]() if how in start else int(given.get("from", 0))
        data = [{"id": n, "kept": given.get("kept")} for n in range(begin + 1, min(begin + 3, 10) + 1)]
        more = begin + 3 < 10
        after = {
            "cursor": str(begin + 3),
            "link": f"?from={begin + 3}&kept={given.get('kept')}",
            "away": "http://127.0.0.1:1/",
            "same": given.get("from", "0"),
        }
        body = {"body": {"rows": data}, "meta": {"next": after.get(how) if more else None}}
        return JSONResponse(body)

    with served(Starlette(routes=[Route("/{how}", rows)])) as url:
        yield url


@pytest.mark.parametrize(
    ("how", "paging"),
    [
        ("number", {"param": "page"}),
        ("offset", {"param": "offset", "start": 0, "step": "rows"}),
        ("cursor", {"next": "meta.next", "param": "from"}),
        ("link", {"next": "meta.next"}),
    ],
)
async def test_pages(run: Any, pool: asyncpg.Pool, pages: str, how: str, paging: dict[str, Any]) -> None:
    await pool.execute("create table t (id int, kept text)")
    place = {"kind": "http", "url": f"{pages}/{how}", "params": {"kept": "x"}, "rows": "body.rows"}

    data = (await run("transfer", source={**place, "paging": paging}, target={"kind": "postgres", "table": "t"})).data

    assert (data["rows"], data["chunks"]) == (10, 4)
    rows = await pool.fetch("select id, kept from t order by id")
    assert [tuple(row) for row in rows] == [(n, "x") for n in range(1, 11)]


@pytest.mark.parametrize(("how", "message"), [("away", "another server"), ("same", "leads to itself")])
async def test_pages_that_lead_astray(run: Any, pool: asyncpg.Pool, pages: str, how: str, message: str) -> None:
    await pool.execute("create table t (id int, kept text)")
    paging = {"next": "meta.next", **({"param": "from"} if how == "same" else {})}
    place = {"kind": "http", "url": f"{pages}/{how}", "rows": "body.rows", "paging": paging}

    with pytest.raises((ToolError, TemplateError), match=message):
        await run("transfer", source=place, target={"kind": "postgres", "table": "t"})

    assert await pool.fetchval("select count(*) from t") == 0


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        (NOWHERE, {"verify": "sum"}, "verify 'sum' is unknown; known: rows, checksum, none"),
        (NOWHERE, {"on_drift": "drop"}, "on_drift 'drop' is unknown; known: error, ignore, add"),
        (NOWHERE, {"resumable": "maybe"}, "resumable 'maybe' is unknown; known: true, false, auto"),
        (NOWHERE, {"resumable": True}, "a source that can go on in the middle"),
        ({"tabel": "t"}, {}, "step stage: source has no field 'tabel'; did you mean 'table'"),
        (
            {"url": "x", "paging": {"param": "o", "steps": 1}},
            {},
            r"source\.paging has no field 'steps'; did you mean 'step'",
        ),
        ({"url": "x", "paging": {"start": 1}}, {}, r"step stage: source\.paging: Value error, needs 'next'"),
        ({"kind": "nats"}, {}, r"source\.kind is 'nats'; kinds: postgres, mysql, sqlite, duckdb, object, http"),
        ("x", {}, "source must be a mapping"),
    ],
)
async def test_what_cannot_be_is_named_with_its_end_and_field(
    run: Any, source: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((ToolError, TemplateError), match=message):
        await run("transfer", source=source, target={"kind": "postgres", "table": "t"}, **given)


async def test_a_transfer_that_is_cancelled_changes_nothing(run: Any, source: asyncpg.Pool) -> None:
    query = "select id, pg_sleep(case id when 2500 then 600 else 0 end)::text as name from source"
    slow = {"kind": "postgres", "query": query}
    transfer = asyncio.create_task(run("transfer", source=slow, target=PG, on_drift="ignore"))
    asleep = """
        select count(*) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()
    """
    await until(lambda: source.fetchval(asleep), "the source to be asked")

    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer

    await until(lambda: _none(source, asleep), "its query to end")
    assert (await run("transfer", source={"kind": "postgres", "table": "source"}, target=PG)).data["rows"] == 2500


async def _none(pool: asyncpg.Pool, query: str) -> bool:
    return await pool.fetchval(query) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,name\n1,x\n2\n", "line 3: a CSV row has 1 values for 2 columns"),
        ('{"id": 1}\n{"id"\n', "line 2: no JSON"),
    ],
)
async def test_what_is_not_of_the_format_is_refused(
    run: Any, pool: asyncpg.Pool, tmp_path: Path, text: str, message: str
) -> None:
    await pool.execute("create table broken (id int, name text)")
    path = "in.jsonl" if text.startswith("{") else "in.csv"
    (tmp_path / path).write_text(text)

    with pytest.raises(ToolError, match=rf"{path}, {message}") as caught:
        await run("transfer", source={"path": path}, target={"kind": "postgres", "table": "broken"})

    assert caught.value.kind == "parse"
    assert await pool.fetchval("select count(*) from broken") == 0


@pytest.mark.parametrize("target", [{"kind": "postgres", "table": "twice"}, {"path": "out.jsonl"}])
async def test_a_column_that_a_file_has_twice_is_an_error(
    run: Any, pool: asyncpg.Pool, tmp_path: Path, target: dict[str, Any]
) -> None:
    await pool.execute("create table twice (id int)")
    pq.write_table(pa.table([[1], [2]], names=["id", "id"]), tmp_path / "in.parquet")

    with pytest.raises(ToolError, match="column 'id' twice"):
        await run("transfer", source={"path": "in.parquet"}, target=target)


async def test_a_body_without_its_rows_is_named(run: Any, server: str) -> None:
    source = {
        "kind": "http",
        "url": f"{server}/as",
        "params": {"type": "application/json", "body": '"rows: ["'},
    }

    with pytest.raises(ToolError, match=r"http://.*/as\?.* has no 'rows'; .* is text: 'rows: \['"):
        await run("transfer", source={**source, "rows": "rows"}, target={"path": "out.jsonl"})
