"""Results of postgres that are larger than a chunk: stored as they come, and read as the same values."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import orjson
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.settings import dump_settings
from noetl_dagster.tools.access.clients import POSTGRES_POOL_SIZE
from noetl_dagster.tools.base import Chunk, ToolCall, ToolContext
from noetl_dagster.tools.sql import views
from tests.tools.chunk_log import Killed, ListLog
from tests.waiting import until

pytestmark = pytest.mark.long

SMALL = 2048
"""Bytes of a chunk here."""

EVERY_TYPE = """
    select n as id, n::int8 * 4000000000 as large, (n::text || ' "quoted", \\
 ümlaut \u2028')::text as name, n % 2 = 0 as even,
        n / 7.0::float8 as ratio, (n / 3.0)::float4 as small, case when n = 5 then 'NaN'::float8 else n end as odd,
        n * 1.5 as price, (n || '12345678901234567890.12')::numeric as exact, n::numeric as whole,
        timestamptz '2026-01-02 03:04:05.678+02' + n * interval '1 s' as at, timestamp '0900-01-02 03:04:05' as local,
        date '2026-01-02' + n as day, time '03:04:05.5' as hour, timetz '03:04:05+02' as zoned,
        n * interval '1 minute' as span, 'infinity'::timestamptz as never,
        md5(n::text)::uuid as key, jsonb_build_object('a', array[n, null], 'b', '{"c": 1.5}'::jsonb) as payload,
        json_build_array(n, 'x') as pair, decode('00ff', 'hex') as bytes, array[n, n + 1] as numbers,
        array[n::numeric, 1.5] as numerics, '10.0.0.1'::inet as address, int4range(n, n + 5) as range, null as nothing,
        '101'::bit(3) as bits, point(n, 1.5) as place
    from generate_series(1, :rows::int) as n order by n
"""


@pytest.fixture
def small(box: ToolContext) -> ToolContext:
    """The toolbox with small chunks."""
    box.settings = box.settings.model_copy(update={"chunk_bytes": SMALL, "inline_result_bytes": 256})
    return box


async def rendered(box: ToolContext, ref: Any, template: str) -> Any:
    """A template over a step ``big`` whose result is a reference, and how many results it fetched."""
    fetched = []

    async def fetch(reference: Any) -> Any:
        fetched.append(reference)
        return await box.results.get(reference)

    scope = {"big": ResultView({"status": "ok", "ref": ref}, ReferenceCache())}
    return await render_async(compile_value(template), scope, fetch), len(fetched)


async def test_values_of_every_type_are_those_of_a_small_result(run: Any, box: ToolContext) -> None:
    first = (await run("postgres", command=EVERY_TYPE, params={"rows": 100})).data  # as the driver gives them
    box.settings = box.settings.model_copy(update={"chunk_bytes": 1024**3})
    few = (await run("postgres", command=EVERY_TYPE, params={"rows": 600})).data
    box.settings = box.settings.model_copy(update={"chunk_bytes": SMALL})
    large = await run("postgres", command=EVERY_TYPE + " -- again", params={"rows": 600})

    assert large.data is None
    assert large.ref.rows == 600
    assert large.ref.extra["parts"] > 100
    whole = await box.results.get(large.ref)
    assert whole["rows"][:100] == first["rows"]
    assert whole == few
    assert [row async for row in box.results.items(large.ref.rows_alone)] == few["rows"]
    assert await box.results.get(f"{large.ref.ref}#rows") == few["rows"]


async def test_templates_find_what_stands_around_the_rows_without_fetching(run: Any, small: ToolContext) -> None:
    sql = "create temp table t on commit drop as select n as id from generate_series(1, 2000) as n; select * from t"
    ref = (await run("postgres", command=sql)).ref

    text = "{{ big.row_count }} {{ big.columns }} {{ big.command_1.row_count }} {{ big.data.row_count }}"
    assert await rendered(small, ref, text) == ("2000 ['id'] 2000 2000", 0)
    assert await rendered(small, ref, "{{ big.rows | length }} {{ big.status }}") == ("2000 ok", 0)
    assert await rendered(small, ref, "{{ 'rows' in big and big.rows is defined }}") == (True, 0)
    assert await rendered(small, ref, "{{ big.rows[3].id }} {{ (big.rows | first).id }}") == ("4 1", 1)
    assert await rendered(small, ref, "{{ big.rows[1999].id }}") == (2000, 2)
    assert await rendered(small, ref, "{{ big.rows | sum(attribute='id') }}") == (2001000, 1)
    whole, _ = await rendered(small, ref, "{{ big }}")
    assert whole == await small.results.get(ref)
    assert (await rendered(small, ref, "{{ big.command_1 }}"))[0] == whole["command_1"]
    assert (await rendered(small, ref, "is {{ big }}"))[0] == f"is {whole}"
    assert (await rendered(small, ref, "{{ big | tojson | fromjson }}"))[0] == whole


async def test_statements_are_one_transaction_with_the_rows(run: Any, small: ToolContext, pool: asyncpg.Pool) -> None:
    await pool.execute("create table t (id int primary key)")
    insert = "insert into t select generate_series(1, 3000)"

    with pytest.raises(ToolError):
        await run("postgres", command=f"{insert}; select 1 / (2999 - id) from t order by id")
    assert await pool.fetchval("select count(*) from t") == 0
    ref = (await run("postgres", command=f"{insert} returning id")).ref
    assert (ref.rows, await pool.fetchval("select count(*) from t")) == (3000, 3000)
    several = (
        await run("postgres", command="select 7 as a; delete from t; select n from generate_series(1, 3000) n")
    ).ref
    whole = await small.results.get(several)
    assert whole["command_0"]["rows"] == [{"a": 7}]
    assert whole["command_1"]["row_count"] == 3000
    assert whole["row_count"] == whole["command_2"]["row_count"] == 3000
    assert whole["rows"][-1] == {"n": 3000}


async def test_earlier_statement_with_many_rows_is_not_in_the_event(run: Any, small: ToolContext) -> None:
    sql = "select n from generate_series(1, 500) n; select n + 1 as m from generate_series(1, 3000) n"
    ref = (await run("postgres", command=sql)).ref

    assert len(ref.model_dump_json()) < 6000
    assert (await rendered(small, ref, "{{ big.command_0.rows[9].n + big.command_1.rows[9].m }}"))[0] == 21
    assert (await small.results.get(ref))["command_0"]["rows"][-1] == {"n": 500}


async def test_same_statement_with_few_rows_and_then_many_runs_its_functions_once(
    run: Any, small: ToolContext, pool: asyncpg.Pool
) -> None:
    await pool.execute("create table t (n int); create function note(n int) returns int language sql as "
                       "'insert into t values (n) returning n'")  # fmt: skip
    sql = "select note(n) as id from generate_series(1, :rows::int) as n"
    for rows in (2, 3, 4000):
        result = await run("postgres", command=sql, params={"rows": rows})
    assert await pool.fetchval("select count(*) from t") == 4005
    assert result.ref.rows == 4000
    plain = "select n as id from generate_series(1, :rows::int) as n"
    for rows in (2, 3, 4000, 3, 2, 0):
        result = await run("postgres", command=plain, params={"rows": rows})
        assert (result.ref.rows if result.ref else result.data["row_count"]) == rows


@pytest.mark.parametrize(
    ("sql", "begun"),
    [
        ("insert into t (id) values (:id), (:id + 10) returning id", 0),
        ('/* its */ insert into public."t" as x values (:id) on conflict do nothing returning id', 0),
        ("insert into t values (:id) on conflict (id) do update set id = excluded.id returning id", 0),
        ("insert into t values (case 'f(x)' when 'f(x)' then :id::int end) /* f(x) */ returning id", 0),
        ("insert into t values (unnest(array[:id::int, :id + 10])) returning id", 2),
        ("insert into t values (pg_catalog.generate_series /* many */ (:id::int, :id)) returning id", 2),
        ('insert into t values ("unnest"(array[:id::int])) on conflict (id) do nothing returning id', 2),
        ("insert into t select :id::int union all values (:id + 10) returning id", 2),
        ("update t set id = id + :id returning id", 2),
        ("with new as (insert into t values (:id) returning id) select new.id from new", 2),
    ],
)
async def test_rows_that_a_statement_lists_take_no_transaction_of_their_own(
    run: Any, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch, sql: str, begun: int
) -> None:
    await pool.execute("create table t (id int primary key)")
    transaction, seen = asyncpg.Connection.transaction, []

    def watched(connection: asyncpg.Connection, **options: Any) -> Any:
        seen.append(connection)
        return transaction(connection, **options)

    monkeypatch.setattr(asyncpg.Connection, "transaction", watched)
    for place in (1, 2):
        data = (await run("postgres", command=sql, params={"id": place})).data
        assert data["columns"] == ["id"]

    assert len(seen) == begun


@pytest.mark.parametrize(("key", "stops"), [(None, 1), ("id", 4)])
async def test_killed_call_goes_on_without_a_chunk_twice(
    run: Any, small: ToolContext, key: str | None, stops: int
) -> None:
    sql = "select n as id, 'name ' || n as name from generate_series(1, 2000) as n"
    extra = {} if key is None else {"key": key}
    small.chunks = told = ListLog()
    told.stops_after = stops
    with pytest.raises(Killed):
        await run("postgres", command=sql, **extra)
    before = list(told.chunks)
    told.stops_after = None

    ref = (await run("postgres", command=sql, **extra)).ref

    assert told.chunks[:stops] == before
    assert [chunk.index for chunk in told.chunks] == list(range(ref.extra["parts"]))
    assert [chunk.more for chunk in told.chunks] == [True] * (len(told.chunks) - 1) + [False]
    rows = [row for chunk in told.chunks for row in await small.results.get(chunk.ref)]
    assert [row["id"] for row in rows] == list(range(1, 2001))
    assert rows == (await small.results.get(ref))["rows"]
    if key is None:  # who cannot seek runs again, and tells of nothing again
        count = len(told.chunks)
        assert await small.results.get((await run("postgres", command=sql)).ref) == await small.results.get(ref)
        assert len(told.chunks) == count
        return
    again = (await run("postgres", command="select * from there_is_no_such_table", **extra)).ref
    assert await small.results.get(again) == await small.results.get(ref)


async def test_source_that_changed_is_an_error_only_where_a_step_took_the_chunks(
    run: Any, small: ToolContext, pool: asyncpg.Pool
) -> None:
    await pool.execute("create table t as select n as id, 0 as price from generate_series(1, 2000) as n")
    small.chunks = told = ListLog()
    told.stops_after = 3
    with pytest.raises(Killed):
        await run("postgres", command="select * from t order by id")
    told.stops_after = None
    before = list(told.chunks)
    await pool.execute("update t set price = 1 where id <= 10; delete from t where id > 400")

    told.takes = True
    with pytest.raises(ToolError, match="chunk 0 is not what it was"):
        await run("postgres", command="select * from t order by id")
    told.takes, told.chunks = False, before
    result = await run("postgres", command="select * from t order by id")
    value = result.data or await small.results.get(result.ref)
    assert [row["id"] for row in value["rows"]] == list(range(1, 401))
    assert value["rows"][0]["price"] == 1


async def test_chunks_that_a_step_takes_are_cut_alike_whatever_ran_before(run: Any, box: ToolContext) -> None:
    sql = "select n, repeat('x', :width::int) as x from generate_series(1, :rows::int) as n"
    wide = {"command": sql, "params": {"width": 200, "rows": 3000}}
    told = ListLog(wanted=True)
    told.stops_after = 2
    small, large = (box.settings.model_copy(update={"chunk_bytes": size}) for size in (1 << 16, 1 << 24))
    box.settings, box.chunks = small, told
    with pytest.raises(Killed):
        await run("postgres", **wide)
    before, told.stops_after = list(told.chunks), None

    box.settings, told.takes, told.chunks = large, False, []
    assert (await run("postgres", command=sql, params={"width": 1, "rows": 1000})).data["row_count"] == 1000
    box.settings, told.takes, told.chunks = small, True, list(before)
    ref = (await run("postgres", **wide)).ref

    assert (told.chunks[:2], ref.rows) == (before, 3000)


async def test_key_has_to_be_a_unique_column(run: Any, small: ToolContext) -> None:
    sql = "select n / 500 as half, nullif(n, 1999) as id from generate_series(1, 2000) as n"
    with pytest.raises(ToolError, match="key 'half' is 0 in two rows"):
        await run("postgres", command=sql, key="half")
    with pytest.raises(ToolError, match="key 'id' is null in a row"):
        await run("postgres", command=sql, key="id")


async def test_small_result_is_told_of_where_a_step_takes_chunks(run: Any, small: ToolContext) -> None:
    small.chunks = told = ListLog(wanted=True)

    ref = (await run("postgres", command="select 1 as one")).ref

    [chunk] = told.chunks
    assert (chunk.index, chunk.more, await small.results.get(chunk.ref)) == (0, False, [{"one": 1}])
    assert (await small.results.get(ref))["rows"] == [{"one": 1}]


class Waiting(ListLog):
    """The chunks of many calls, whose takers have no room for a second one until it is made."""

    def __init__(self) -> None:
        super().__init__(wanted=True)
        self.begun = 0
        self.has_room = asyncio.Event()

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        return []

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        if chunks:
            self.begun += chunks[0].index == 0
            await self.has_room.wait()


async def connections(pool: asyncpg.Pool, mark: str) -> int:
    """Those whose latest statement has a mark."""
    sql = "select count(*) from pg_stat_activity where query like '%' || $1 || '%' and pid <> pg_backend_pid()"
    return int(await pool.fetchval(sql, mark))


@pytest.mark.parametrize("kind", ["rows", "table"])
async def test_sources_that_wait_for_takers_leave_the_pool_to_them(
    run: Any, small: ToolContext, pool: asyncpg.Pool, kind: str
) -> None:
    small.chunks = waiting = Waiting()
    mark = f"source_of_{kind}"
    sql = f"select n as {mark} from generate_series(1, 9) as n"
    calls = [run("postgres", command=sql, chunk_size=3, **{"as": kind}) for _ in range(POSTGRES_POOL_SIZE + 1)]
    sources = [asyncio.create_task(call) for call in calls]
    await until(lambda: waiting.begun == len(sources), "the first chunk of each")

    assert await connections(pool, mark) == len(sources)
    waiting.has_room.set()
    assert [(await source).ref.rows for source in sources] == [9] * len(sources)

    async def closed() -> bool:
        return await connections(pool, mark) == 0

    await until(closed, "their connections to be closed")


@pytest.mark.parametrize("kind", ["rows", "table"])
async def test_source_may_be_idle_as_long_as_its_takers_need(
    run: Any, small: ToolContext, pool: asyncpg.Pool, kind: str
) -> None:
    small.chunks = waiting = Waiting()
    [database] = await pool.fetchrow("select quote_ident(current_database())")
    await pool.execute(f"alter database {database} set idle_in_transaction_session_timeout = 200")
    sql = "select n as patient from generate_series(1, 9) as n"
    source = asyncio.create_task(run("postgres", command=sql, chunk_size=3, **{"as": kind}))
    await until(lambda: waiting.begun, "the first chunk")
    await asyncio.sleep(0.6)
    waiting.has_room.set()

    assert (await source).ref.rows == 9


async def test_lost_connection_in_the_middle_is_retryable(run: Any, small: ToolContext, pool: asyncpg.Pool) -> None:
    small.chunks = waiting = Waiting()
    sql = "select n as interrupted from generate_series(1, 9) as n"
    source = asyncio.create_task(run("postgres", command=sql, chunk_size=3, **{"as": "rows"}))
    await until(lambda: waiting.begun, "the first chunk")
    end = "select pg_terminate_backend(pid) from pg_stat_activity where query like '%interrupted%' and pid <> pg_backend_pid()"
    assert await pool.fetch(end)
    waiting.has_room.set()

    with pytest.raises(ToolError, match="connection to the server was lost") as caught:
        await source
    assert (caught.value.kind, caught.value.retryable) == ("db_connection", True)


async def test_server_without_a_connection_left_says_what_helps(
    run: Any, small: ToolContext, administrator: Any
) -> None:
    user = f"limited_{uuid4().hex}"
    administrator.execute(f"create role {user} login password 'x' connection limit 0")
    small.chunks = ListLog(wanted=True)
    parts = urlsplit(small.settings.db_url)
    auth = {"type": "postgres", "url": f"postgresql://{user}:x@{parts.netloc.rpartition('@')[2]}{parts.path}"}
    try:
        with pytest.raises(ToolError, match=r"too many connections.*raise its max_connections") as caught:
            await run("postgres", command="select 1", auth=auth)
    finally:
        administrator.execute(f"drop role {user}")
    assert (caught.value.kind, caught.value.code, caught.value.retryable) == ("db_connection", "53300", True)


async def test_chunks_have_as_many_rows_as_the_task_says(run: Any, small: ToolContext) -> None:
    sql = "select n from generate_series(1, 1000) as n"
    result = await run("postgres", command=sql, chunk_size=70, **{"as": "rows"})

    parts = [part.rows async for part in small.results.parts(result.ref)]
    assert parts == [70] * 14 + [20]


AGGREGATE = """
    select count(*) as n, sum(id) as total, max(name) as name, typeof(any_value(moment)) as moment, any_value(typeof(price)) as price
    from load
"""


@pytest.mark.parametrize(
    ("price", "given"), [("n * 1.5::float8", "whole"), ("n * 1.5", "rows"), ("case when n > 10 then n end", "rows")]
)
async def test_duckdb_reads_many_rows_as_few(run: Any, box: ToolContext, price: str, given: str) -> None:
    sql = (
        f"select null as nothing, n as id, 'name ' || n as name, timestamp '2026-01-01' + n * interval '1 s' as moment, "
        f"{price} as price from generate_series(1, 1000) as n"
    )
    few = (await run("postgres", command=sql)).data
    box.settings = box.settings.model_copy(update={"chunk_bytes": SMALL})
    ref = (await run("postgres", command=f"{sql} --")).ref
    if given == "rows":
        few, ref = few["rows"], ref.rows_alone.model_dump(mode="json")

    expected = (await run("duckdb", command=AGGREGATE, input={"load": few})).data["rows"]
    assert expected[0]["n"] == 1000
    assert (await run("duckdb", command=AGGREGATE, input={"load": ref})).data["rows"] == expected
    box.settings = box.settings.model_copy(update={"chunk_bytes": 1024**2})
    listed = (await run("duckdb", command="select * from load order by id limit 20", input={"load": ref})).data
    assert listed["columns"] == ["nothing", "id", "name", "moment", "price"]
    assert listed["rows"] == (few["rows"] if isinstance(few, dict) else few)[:20]


async def test_many_rows_of_duckdb_are_in_chunks(run: Any, small: ToolContext) -> None:
    sql = (
        "select 1 as a; select range as id, date '2026-01-01' as day, {'a': range} as part from range(5000) order by id"
    )
    ref = (await run("duckdb", command=sql)).ref

    assert ref.extra["parts"] > 2
    whole = await small.results.get(ref)
    assert whole["rows"] == [{"id": n, "day": "2026-01-01", "part": {"a": n}} for n in range(5000)]
    assert whole["command_0"]["rows"] == [{"a": 1}]
    assert whole["command_1"]["row_count"] == whole["row_count"] == 5000
    parts = (await run("duckdb", command="select sum(part.a) as n from load", input={"load": ref})).data
    assert parts["rows"] == [{"n": 12497500}]


MEASURED = """
import asyncio, gc, re, sys
from pathlib import Path
from noetl_dagster.events.connection import open_pool
from noetl_dagster.playbook.models import Task
from noetl_dagster.settings import load_settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.registry import tool_for
from tests.tools.chunk_log import NoLog

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

async def main(settings):
    pool, clients = await open_pool(settings.db_url, size=2), Clients(settings)
    async with ResultStore(settings, pool) as results:
        box = NoLog().toolbox(settings, results, Credentials(settings, pool), clients, None)
        sql = "select n as id, 'name ' || n as name, n * 0.5::float8 as price from generate_series(1, {}) as n"
        for rows in (20_000, 200_000):
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            idle = memory("VmRSS")
            call = ToolCall(7001, "s", Task(name="t", kind="postgres"), {"command": sql.format(rows)}, {}, auth="x")
            ref = (await tool_for("postgres").run(call, box)).ref
            assert ref.rows == rows, ref
            peak = memory("VmHWM") - idle
            count = 0
            async for batch in results.batches(ref.rows_alone):
                count += len(batch)
            assert count == rows
            print(peak, memory("VmHWM") - idle, ref.bytes_size)
    await clients.close()
    await pool.close()

asyncio.run(main(load_settings(sys.stdin.read())))
"""


async def test_memory_is_that_of_chunks_whatever_the_number_of_rows(small: ToolContext) -> None:
    settings = small.settings.model_copy(update={"chunk_bytes": 1024**2})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEASURED, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(dump_settings(settings).encode())
    assert process.returncode == 0
    _, (written, read, size) = (tuple(map(int, line.split())) for line in output.decode().splitlines())
    assert size > 9 * settings.chunk_bytes
    assert written < 8 * settings.chunk_bytes  # as values the rows are some hundred chunks
    assert read < 12 * settings.chunk_bytes


async def test_duckdb_reads_rows_that_are_long(run: Any, small: ToolContext) -> None:
    sql = "select n as id, repeat('x', case n when 3 then 20000000 else 1 end) as text from generate_series(1, 300) n"
    ref = (await run("postgres", command=sql)).ref

    found = await run("duckdb", command="select sum(length(text)) as n from load", input={"load": ref})
    assert found.data["rows"] == [{"n": 20000299}]


async def test_lines_for_duckdb_are_cut_where_a_row_ends(
    run: Any, small: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "LINES_BYTES", 1000)
    sql = "select n as id, repeat('x', case n % 50 when 0 then 3000 else 20 end) as text from generate_series(1, 900) n"
    ref = (await run("postgres", command=sql)).ref

    files = await views.write_files(small.results, ref.rows_alone, tmp_path, lambda rows: pytest.fail("values"))
    assert files is not None
    data = [path.read_bytes() for path in files.paths]
    assert len(data) > 30
    assert max(map(len, data)) == files.largest < 1000 + 3100
    assert all(len(one) >= 1000 for one in data[:-1])
    rows = [[orjson.loads(line) for line in one.splitlines()] for one in data]
    assert [row["id"] for some in rows for row in some] == list(range(1, 901))
