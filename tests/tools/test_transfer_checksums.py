"""``verify: checksum`` between real stores: what was read and what the target keeps, whatever their types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.files import ParquetRows
from tests.serving import served

pytestmark = pytest.mark.long

FILL = """
create table source as
select n as id, case n % 4 when 0 then '' when 1 then null else E'n\\t''"\\\\\\n' || n end as name,
       n * 1.50::numeric as price, sqrt(n) * 1e12 as root, (n * 0.1)::real as small,
       timestamptz '2026-03-29 00:30+00' + n * interval '61.000001 s' as at, timestamp '1969-12-31 23:59:59.5' as local,
       date '2026-01-01' - n as day, time '23:59:59.000001' as clock, n % 2 = 0 as even, gen_random_uuid() as uid,
       jsonb_build_object('n', n, 'deep', jsonb_build_array(1, null, 2)) as doc,
       array['a', 'b "q"', null, ''] as tags, decode('00ff', 'hex') as raw, interval '1 mon 90 s' as took
from generate_series(1, 500) as n
"""
PLAIN = "id, name, price, root, small, at, local, day, even, uid"
PG = {"kind": "postgres", "table": "target"}


@pytest.fixture
async def source(pool: asyncpg.Pool) -> asyncpg.Pool:
    await pool.execute(FILL)
    await pool.execute("create table target (like source); alter table target add primary key (id)")
    return pool


@pytest.mark.parametrize(
    ("end", "columns"),
    [("parquet", PLAIN), *((end, "*") for end in ("parquet", "jsonl", "json", "duckdb", "s3"))],
)
async def test_out_of_postgres_and_back(
    run: Any, source: asyncpg.Pool, box: ToolContext, tmp_path: Path, end: str, columns: str
) -> None:
    if end == "duckdb":  # whose intervals Arrow cannot compare
        await source.execute("alter table source drop column took; alter table target drop column took")
    query = {"kind": "postgres", "query": f"select {columns} from source"}
    away: dict[str, Any] = {"path": f"rows.{end}"}
    if end == "duckdb":
        away = {"kind": "duckdb", "database": "own.db", "table": "rows"}
    if end == "s3":
        away = {"path": f"s3://{box.settings.minio_bucket}/{tmp_path.name}/rows.parquet"}

    there = (await run("transfer", source=query, target=away, verify="checksum", chunk_size=120)).data
    back = (await run("transfer", source=away, target=PG, verify="checksum", chunk_size=70)).data

    for data in (there, back):
        assert data["checksum"].startswith("500:")
        assert data["verified"]["by"] == "checksum"
        assert data["verified"]["read"] == data["verified"]["written"] == 500
    listed = "id, name, price, root, at, local, day, even, uid" + ("" if columns == PLAIN else ", tags, raw")
    missing = f"select {listed} from source except select {listed} from target"
    assert await source.fetch(missing) == []


@pytest.fixture
def url() -> Iterator[str]:
    async def rows(request: Request) -> JSONResponse:
        first = int(request.query_params.get("from", "0"))
        data = [{"id": n, "price": n + 0.25, "doc": {"b": 1, "a": [n, None]}} for n in range(first, first + 50)]
        return JSONResponse({"data": data, "next": first + 50 if first < 450 else None})

    with served(Starlette(routes=[Route("/rows", rows)])) as address:
        yield f"{address}/rows"


@pytest.fixture
async def inputs(run: Any, box: ToolContext, tmp_path: Path, url: str) -> dict[str, dict[str, Any]]:
    """The same 500 rows, whose prices have a fraction, in every kind of place."""
    rows = [{"id": n, "price": n + 0.25, "doc": {"b": 1, "a": [n, None]}} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    (tmp_path / "rows.json").write_bytes(orjson.dumps(rows))
    lines = [f'{n},{n}.250,"{{""a"": [{n}, null], ""b"":1}}"' for n in range(500)]
    (tmp_path / "rows.csv").write_text("\n".join(["id,price,doc", *lines]))
    with duckdb.connect(str(tmp_path / "rows.db")) as connection:
        connection.execute(f"create table rows as from '{tmp_path}/rows.parquet'")
    ref = await box.results.put(rows, execution_id=7001, step="load", name="rows")
    return {
        **{end: {"path": f"rows.{end}"} for end in ("parquet", "jsonl", "json", "csv")},
        "duckdb": {"kind": "duckdb", "database": "rows.db", "table": "rows"},
        "http": {"kind": "http", "url": url, "rows": "data", "paging": {"next": "next", "param": "from"}},
        "result": {"ref": ref},
    }


KINDS = ["parquet", "jsonl", "json", "csv", "duckdb", "http", "result"]


@pytest.mark.parametrize(
    ("kind", "mode"), [*((kind, "append") for kind in KINDS), ("csv", "replace"), ("http", "upsert")]
)
async def test_into_postgres_unless_a_column_changes_values(
    run: Any, pool: asyncpg.Pool, inputs: dict[str, dict[str, Any]], kind: str, mode: str
) -> None:
    await pool.execute("create table target (doc jsonb, id bigint primary key, price numeric(10, 1), note text)")
    await pool.execute("insert into target select null, n, 1 from generate_series(1000, 1100) as n")

    with pytest.raises(ToolError, match=r"checksum of what was read is 500:.*table \"target\" changes values"):
        await run("transfer", source=inputs[kind], target=PG, mode=mode, verify="checksum")
    assert await pool.fetchval("select count(*) from target") == 101, "as before"
    await pool.execute("alter table target alter column price type numeric(10, 2)")
    data = (await run("transfer", source=inputs[kind], target=PG, mode=mode, verify="checksum", chunk_size=60)).data

    assert data["checksum"].startswith("500:")
    assert await pool.fetchval("select sum(price) from target where id < 500") == 500 * 499 / 2 + 125
    assert await pool.fetchval("select count(*) from target") == (500 if mode == "replace" else 601)


async def test_a_trigger_that_changes_values_is_seen(run: Any, source: asyncpg.Pool) -> None:
    await source.execute(
        """
        create function other() returns trigger language plpgsql as
          $$begin new.even := not new.even; return new; end$$;
        create trigger t before insert on target for each row execute function other()
        """
    )
    rows = {"kind": "postgres", "table": "source"}

    with pytest.raises(ToolError, match="checksum of what was read"):
        await run("transfer", source=rows, target=PG, verify="checksum")

    assert await source.fetchval("select count(*) from target") == 0


async def test_csv_has_no_word_for_empty_text(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"id": 1, "name": ""}')
    (tmp_path / "fine.jsonl").write_text('{"id": 1, "name": [""], "x": {"a": 1}}')
    target = {"path": "out.csv"}
    (tmp_path / "out.csv").write_text("old")

    with pytest.raises(ToolError, match=r"checksum of what was read.*the file out\.csv"):
        await run("transfer", source={"path": "empty.jsonl"}, target=target, verify="checksum")
    assert (tmp_path / "out.csv").read_text() == "old"
    data = (await run("transfer", source={"path": "fine.jsonl"}, target=target, verify="checksum")).data
    assert data["checksum"].startswith("1:")


async def test_json_has_no_word_for_nan(run: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1.5, float("nan")]}), tmp_path / "in.parquet")

    with pytest.raises(ToolError, match="checksum of what was read"):
        await run("transfer", source={"path": "in.parquet"}, target={"path": "out.jsonl"}, verify="checksum")
    data = (
        await run("transfer", source={"path": "in.parquet"}, target={"path": "out.parquet"}, verify="checksum")
    ).data

    assert not (tmp_path / "out.jsonl").exists()
    assert data["checksum"].startswith("2:")
    assert data["verified"]["sha256"].startswith("sha256:")


async def test_a_file_that_holds_other_rows_is_not_published(
    run: Any, source: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = ParquetRows._flush

    def doubled(self: ParquetRows) -> None:
        if self._waiting:
            table = self._waiting[0]
            self._waiting = [pa.concat_tables([table.slice(1), table.slice(1, 1)]), *self._waiting[1:]]
        flush(self)

    monkeypatch.setattr(ParquetRows, "_flush", doubled)
    (tmp_path / "out.parquet").write_text("old")
    given = {"source": {"kind": "postgres", "table": "source"}, "target": {"path": "out.parquet"}}

    with pytest.raises(ToolError, match=r"500:\d+, of what was written 500:\d+"):
        await run("transfer", **given, verify="checksum")

    assert (tmp_path / "out.parquet").read_text() == "old"


@pytest.mark.parametrize("end", ["parquet", "duckdb", "csv", "jsonl", "postgres"])
@pytest.mark.parametrize("columns", ["d, w, u, s, j", "d, w, u, s, j, array[d] as items"])
async def test_numbers_keep_their_digits(run: Any, pool: asyncpg.Pool, tmp_path: Path, end: str, columns: str) -> None:
    await pool.execute(
        "create table source as select '1234567890123456.7891'::numeric(20, 4) as d, 7::numeric(30) as w, "
        "'1234567890123456.78910'::numeric as u, 3.4::real as s, '{\"n\": 1234567890123456.7891}'::jsonb as j"
    )
    source = {"kind": "postgres", "query": f"select {columns} from source"}
    target = {"path": f"out.{end}"}
    if end == "duckdb":
        target = {"kind": "duckdb", "database": "own.db", "table": "rows"}
    if end == "postgres":
        await pool.execute("create table target (like source); alter table target add items numeric(20, 4)[]")
        target = PG
    if end in ("csv", "jsonl", "postgres"):
        source["query"] = source["query"].replace(", j", "")

    for verify in ("rows", "checksum"):
        await run("transfer", source=source, target=target, verify=verify, mode="replace")

    with duckdb.connect(str(tmp_path / "own.db")) as connection:
        if end == "postgres":
            rows = [tuple(row) for row in await pool.fetch("select d::text, w::text, u::text, s::text from target")]
        else:
            table = (
                "rows"
                if end == "duckdb"
                else f"'out.{end}'"
                if end != "csv"
                else "read_csv('out.csv', all_varchar=true)"
            )
            table = table.replace("'out.", f"'{tmp_path}/out.")
            rows = connection.execute(f"select d::varchar, w::varchar, u::varchar, s::varchar from {table}").fetchall()
        assert rows == [("1234567890123456.7891", "7", "1234567890123456.78910", "3.4")]
        if end in ("parquet", "duckdb"):
            [kinds] = connection.execute(
                f"select typeof(d), typeof(w), typeof(u), typeof(s), j from {table}"
            ).fetchall()
            assert kinds[:4] == ("DECIMAL(20,4)", "DECIMAL(30,0)", "VARCHAR", "DOUBLE")
            assert "1234567890123456.7891" in kinds[4]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("'infinity'::date", "column x.*infinity"),
        ("'-infinity'::timestamptz", "column x.*infinity"),
        ("'NaN'::numeric(5, 2)", "column x.*NaN"),
    ],
)
@pytest.mark.parametrize("other", ["1", "array[1]"])
async def test_what_arrow_has_no_form_for_is_refused(
    run: Any, box: ToolContext, value: str, message: str, other: str
) -> None:
    query = f"select {other} as n, {value} as x"
    with pytest.raises(ToolError, match=message):
        await run("transfer", source={"kind": "postgres", "query": query}, target={"path": "out.parquet"})
    with pytest.raises(ToolError, match="row 1, column x"):
        await run("postgres", command=query, **{"as": "table"})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("INTEGER", 1.5, "checksum of what was read is 1:"),
        ("DECIMAL(10, 1)", 1.55, "checksum of what was read is 1:"),
        ("INTEGER", "1", "cannot compare column n, which was read as string and is int32"),
        ("JSON", {"a": 1}, "cannot compare column n, which was read as struct"),
    ],
)
async def test_what_duckdb_makes_of_values(run: Any, tmp_path: Path, column: str, value: Any, message: str) -> None:
    with duckdb.connect(str(tmp_path / "own.db")) as connection:
        connection.execute(f"create table t (n {column})")
    (tmp_path / "in.jsonl").write_bytes(orjson.dumps({"n": value}))
    target = {"kind": "duckdb", "database": "own.db", "table": "t"}

    with pytest.raises(ToolError, match=message):
        await run("transfer", source={"path": "in.jsonl"}, target=target, verify="checksum")

    with duckdb.connect(str(tmp_path / "own.db")) as connection:
        assert connection.execute("from t").fetchall() == []


async def test_text_that_postgres_cannot_hold_is_not_cut(run: Any, pool: asyncpg.Pool, tmp_path: Path) -> None:
    await pool.execute("create table target (name text)")
    pq.write_table(pa.table({"name": ["a\0b"]}), tmp_path / "in.parquet")
    given = {"source": {"path": "in.parquet"}, "target": PG}

    for verify in ("checksum", "rows"):
        with pytest.raises(ToolError, match="0x00"):
            await run("transfer", **given, verify=verify)


async def test_what_cannot_be_read_back_is_refused(run: Any) -> None:
    with pytest.raises(ToolError, match="http cannot; write verify: rows"):
        await run(
            "transfer",
            source={"path": "in.csv"},
            target={"kind": "http", "url": "http://127.0.0.1:1/"},
            verify="checksum",
        )
