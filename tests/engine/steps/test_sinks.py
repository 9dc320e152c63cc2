"""Sinks to DuckDB, files and buckets: once an iteration, whoever dies when, and seen when it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.parquet as pq
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage.reading import ResultReader
from noetl_dagster.tools.rows.batches import StoredResult
from noetl_dagster.tools.sinks import duckdb as duckdb_parts
from noetl_dagster.tools.sinks.parts import PartSinks
from noetl_dagster.tools.sinks.place import PartPlace, SinkKind
from noetl_dagster.tools.sql import duckdb as duckdb_files
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.runner import Call
from tests import forked
from tests.playbooks import playbook

if TYPE_CHECKING:
    from tests.mysql import Server

pytestmark = pytest.mark.long

LOOP = """
workflow:
  - step: each
    loop: {in: "{{ range(5) | list }}", iterator: n, spec: {mode: sequential}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n}"}
    sink: SINK
"""


class Died(BaseException):
    """The end of a process, after which it does nothing more."""


class Place:
    """A sink and what readers of it see."""

    def __init__(self, kind: str, folder: Path, server: Server | None = None) -> None:
        self._kind, self._folder = kind, folder
        self._server, self.database = server, "" if server is None else server.new_database()
        self.sink = {
            "sqlite": f"{{tool: sqlite, database: {folder}/rows.sqlite, table: numbers}}",
            "mysql": "{tool: mysql, auth: mysql_of_tests, table: numbers}",
            "duckdb": f"{{tool: duckdb, database: {folder}/rows.duckdb, table: numbers}}",
            "file": f"{{tool: file, path: {folder}/parts, format: jsonl}}",
        }[kind]
        if kind in ("sqlite", "mysql"):
            self._run("CREATE TABLE numbers (n INT)")

    @property
    def playbook(self) -> Any:
        return playbook(LOOP.replace("SINK", self.sink))

    def seen(self) -> list[int]:
        """What readers see, in order."""
        return sorted(n for (n,) in self._run("SELECT n FROM numbers"))

    def staged(self) -> list[str]:
        """Every file that is not published."""
        return [path.name for path in self._folder.rglob("_staged/*") if path.is_file()]

    def _run(self, statement: str) -> Any:
        if self._server is not None:
            return self._server.execute(self.database, statement)
        if self._kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self._folder / "rows.sqlite")) as opened:
                return opened.execute(statement).fetchall()
        if self._kind == "duckdb":
            with duckdb.connect(str(self._folder / "rows.duckdb")) as connection:
                return connection.execute(statement).fetchall()
        return duckdb.sql(f"SELECT n FROM read_json('{self._folder}/parts/*.jsonl')").fetchall()


@pytest.fixture(params=["duckdb", "sqlite", "mysql", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    server = request.getfixturevalue("mysql") if request.param == "mysql" else None
    found = Place(request.param, tmp_path, server)
    if server is not None:
        monkeypatch.setenv("NOETL_CREDENTIAL_MYSQL_OF_TESTS", server.url(found.database))
    return found


async def test_each_iteration_is_written_once(engine: Engine, place: Place) -> None:
    """A worker that comes late writes nothing: its part has the name of a published one, and the log refuses its end."""
    state = await engine.run(place.playbook)
    assert str(state.status) == "COMPLETED", state.error
    assert place.staged() == []
    execution = await engine.runtime.load(state.execution_id)
    command = Command(execution.id, "each", index=1, item=1, loop_id=execution.state.loops[("each", 1)][0].loop_id)
    await engine.runtime.runner.run(Call(execution.visit("each"), command), claimed=True)
    assert place.seen() == [0, 1, 2, 3, 4]


def die_at(patch: pytest.MonkeyPatch, method: str, *, before: bool = False, call: int = 1) -> None:
    """Ends the process before or after a call of a method of the sinks; ``call`` counts from 0."""
    real, calls = getattr(PartSinks, method), iter(range(100))

    async def dying(*args: Any, **kwargs: Any) -> Any:
        dies = next(calls) == call
        if dies and before:
            raise Died
        result = await real(*args, **kwargs)
        if dies:
            raise Died
        return result

    patch.setattr(PartSinks, method, dying)


async def test_nothing_is_lost_nor_written_twice(engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One execution dies between stage and completion, between completion and publication, and after the latter."""
    execution = await engine.lifecycle.create(place.playbook)
    work: Coroutine[Any, Any, Any] = engine.guard(execution, engine.walker.run(execution))
    for method, before, seen in (("stage", False, [0]), ("publish", True, [0, 1]), ("publish", False, [0, 1, 2, 3, 4])):
        with monkeypatch.context() as patch:
            die_at(patch, method, before=before)
            with pytest.raises(Died):
                await work
        assert place.seen() == seen
        work = engine.resume(execution.id)
    state = await work
    assert str(state.status) == "COMPLETED", state.error
    assert place.seen() == [0, 1, 2, 3, 4]
    assert place.staged() == []


async def test_files_of_their_own_that_wait_for_the_end_of_the_step(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of workers of the pool: all are staged in one folder, and each goes where it belongs."""

    async def later(*_: Any) -> None:
        """Leaves a part staged."""

    monkeypatch.setattr(PartSinks, "publish", later)
    sink = f"{{tool: file, path: '{tmp_path}/{{{{ n }}}}.jsonl'}}"
    state = await engine.run(playbook(LOOP.replace("SINK", sink)))
    assert str(state.status) == "COMPLETED", state.error
    assert texts(tmp_path) == {f"{n}.jsonl": f'{{"n":{n}}}\n' for n in range(5)}


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.jsonl")}


@pytest.mark.parametrize("place", ["file"], indirect=True)
async def test_a_cancellation_publishes_what_is_complete(
    engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = await engine.lifecycle.create(place.playbook)
    with monkeypatch.context() as patch:
        die_at(patch, "publish", before=True, call=2)
        with pytest.raises(Died):
            await engine.guard(execution, engine.walker.run(execution))
    assert await engine.lifecycle.cancel(execution.id)
    assert place.seen() == [0, 1, 2]


HOLDER = """
import duckdb, sys, time
connection = duckdb.connect(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


async def test_a_database_that_another_process_holds_is_waited_for(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.duckdb"
    waited = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_held = duckdb_files.is_held

    def noted(error: duckdb.Error) -> bool:
        loop.call_soon_threadsafe(waited.set)
        return is_held(error)

    monkeypatch.setattr(duckdb_files, "is_held", noted)
    holder = forked.start([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
        sink = f"{{tool: duckdb, database: {file}, table: numbers}}"
        work = asyncio.create_task(engine.run(playbook(LOOP.replace("SINK", sink))))
        await waited.wait()
        holder.kill()
        state = await work
    finally:
        holder.kill()
        holder.stdout.close()
    assert str(state.status) == "COMPLETED", state.error
    with duckdb.connect(str(file)) as connection:
        assert connection.execute("SELECT count(*) FROM numbers").fetchall() == [(5,)]


async def test_replace_and_upsert_in_duckdb(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "rows.duckdb"
    with duckdb.connect(str(file)) as connection:
        connection.execute("CREATE TABLE latest (n INT, seen INT)")
        connection.execute("CREATE TABLE own (execution_id BIGINT, iter_index INT, n INT)")
    text = f"""
    workflow:
      - step: start
        loop: {{in: "{{{{ range(4) | list }}}}", iterator: n}}
        tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = {{'n': n % 2, 'seen': n}}"}}
        sink: {{tool: duckdb, database: {file}, table: latest, mode: upsert, key: n}}
        next: [own]
      - step: own
        loop: {{in: "{{{{ range(3) | list }}}}", iterator: n}}
        tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = {{'n': n}}"}}
        sink: {{tool: duckdb, database: {file}, table: own, mode: replace}}
    """
    state = await engine.run(playbook(text))
    assert str(state.status) == "COMPLETED", state.error
    with duckdb.connect(str(file)) as connection:
        assert connection.execute("SELECT * FROM latest ORDER BY n").fetchall() == [(0, 2), (1, 3)]
        rows = connection.execute("SELECT execution_id, iter_index, n FROM own ORDER BY n").fetchall()
    assert rows == [(state.execution_id, n, n) for n in range(3)]


@pytest.mark.parametrize("name", ["parts", "rows.duckdb"])
async def test_parts_on_another_machine_fail_the_step(
    engine: Engine, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete, and neither staged nor published where the step ends, is not passed over."""
    here, there = tmp_path / "here", tmp_path / "there"
    sink = f"{{tool: file, path: {here}/{name}, format: jsonl}}"
    if name == "rows.duckdb":
        sink = f"{{tool: duckdb, database: {here}/{name}, table: numbers}}"
    settle = PartSinks.publish_staged

    async def later(*_: Any) -> None:
        """Leaves a part staged."""

    async def elsewhere(*args: Any, **kwargs: Any) -> None:
        here.rename(there)
        await settle(*args, **kwargs)

    monkeypatch.setattr(PartSinks, "publish", later)
    monkeypatch.setattr(PartSinks, "publish_staged", elsewhere)
    state = await engine.run(playbook(LOOP.replace("SINK", sink)))
    assert str(state.status) == "FAILED"
    assert "sink: 5 parts of complete iterations, the first" in (state.error or "")
    assert f"as this process sees {here}" in (state.error or "")


async def test_a_part_that_a_killed_process_was_writing_is_removed(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = tmp_path / "numbers" / "_staged"
    of_another = "1.each.1.9.1.jsonl#1"  # execution 1 may be writing it
    settle = PartSinks.publish_staged

    async def after_a_kill(sinks: PartSinks, places: Any, prefix: str, **named: Any) -> None:
        drafts.mkdir(exist_ok=True)
        for name in (f"{prefix}9.1.jsonl#1", of_another):
            (drafts / name).touch()
        await settle(sinks, places, prefix, **named)

    monkeypatch.setattr(PartSinks, "publish_staged", after_a_kill)
    sink = f"{{tool: file, path: {tmp_path}/numbers, format: jsonl}}"
    state = await engine.run(playbook(LOOP.replace("SINK", sink)))
    assert str(state.status) == "COMPLETED", state.error
    assert [path.name for path in drafts.iterdir()] == [of_another]


async def test_sinks_to_local_files_stay_with_the_driver(engine: Engine, place: Place) -> None:
    text = LOOP.replace("SINK", place.sink).replace("tool: {kind", "spec: {dispatch: workers}\n    tool: {kind")
    program = (await engine.lifecycle.create(playbook(text))).program.step("each")
    assert program.in_pool == (program.sink is not None and program.sink.tool == "mysql")


@pytest.mark.parametrize("kind", ["one.jsonl", "replace", "upsert"])
async def test_a_part_of_an_earlier_run_does_not_replace_newer_ones(
    engine: Engine, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.duckdb"
    sink = (
        f"{{tool: duckdb, database: {file}, table: latest, mode: {kind}, key: one, args: {{one: 1, n: '{{{{ n }}}}'}}}}"
    )
    if kind == "one.jsonl":
        sink = f"{{tool: file, path: {tmp_path}/one.jsonl}}"
    execution = await engine.lifecycle.create(playbook(LOOP.replace("SINK", sink)))
    with monkeypatch.context() as patch:
        die_at(patch, "publish", before=True, call=2)
        with pytest.raises(Died):
            await engine.guard(execution, engine.walker.run(execution))
    state = await engine.resume(execution.id)
    assert str(state.status) == "COMPLETED", state.error
    if kind == "one.jsonl":
        assert texts(tmp_path) == {"one.jsonl": '{"n":4}\n'}
        return
    with duckdb.connect(str(file)) as connection:
        assert connection.execute("SELECT n FROM latest").fetchall() == [(4,)]


def duckdb_place(folder: Path, **fields: Any) -> PartPlace:
    path = str(folder / "rows.duckdb")
    return PartPlace(**{"kind": SinkKind.DUCKDB, "path": path, "part": "1.each.1.0.1", "table": "t"} | fields)


async def staged_and_published(place: PartPlace, result: Any) -> None:
    parts = duckdb_parts.DuckdbParts()
    await parts.stage(place, result)
    await parts.publish(place.target, [place])


@pytest.mark.parametrize("stored", [False, True])
async def test_a_column_that_differs_in_case_from_one_that_names_the_iteration_is_kept(
    tmp_path: Path, stored: bool
) -> None:
    rows = [{"n": 1, "Execution_Id": "mine", "ITER_INDEX": 7}, {"n": 2}]

    async def in_two() -> AsyncIterator[Any]:
        for row in rows:
            yield [row]

    async def whole() -> Any:
        raise AssertionError("nobody needs the whole")

    result = StoredResult(in_two, whole) if stored else rows
    with duckdb.connect(str(tmp_path / "rows.duckdb")) as connection:
        connection.execute("CREATE TABLE there (n INT, execution_id VARCHAR, iter_index INT)")
    for table in ("made", "there"):
        place = duckdb_place(tmp_path, table=table, own={"execution_id": 5, "iter_index": 0})
        await staged_and_published(place, result)
        with duckdb.connect(place.path) as connection:
            found = connection.execute(f"SELECT n, execution_id, iter_index FROM {table} ORDER BY n").fetchall()
        assert found == [(1, "mine", 7), (2, None, None)]


def rows_of(place: PartPlace, columns: str = "*") -> list[tuple[Any, ...]]:
    with duckdb.connect(place.path) as connection:
        return connection.execute(f"SELECT {columns} FROM t ORDER BY 1").fetchall()


@pytest.mark.parametrize(
    ("first", "later", "column"),
    [
        (1, 2.5, "v is BIGINT and would change DOUBLE '2.5'"),
        (1, "2.5", "v is BIGINT and would change VARCHAR '2.5'"),
        (1.5, 2**53 + 1, "v is DOUBLE and would change BIGINT '9007199254740993'"),
        ({"x": 1}, {"x": 2.5}, "v is STRUCT(x BIGINT) and would change STRUCT(x DOUBLE)"),
        ([1], [2.5], "v is BIGINT[] and would change DOUBLE[]"),
    ],
)
async def test_a_value_that_a_column_would_change_is_refused(
    tmp_path: Path, first: Any, later: Any, column: str
) -> None:
    await staged_and_published(duckdb_place(tmp_path), {"v": first})
    with pytest.raises(ToolError, match=re.escape(column)):
        await duckdb_parts.DuckdbParts().stage(duckdb_place(tmp_path, part="1.each.1.1.1"), {"v": later})


async def test_values_that_columns_hold_unchanged_are_written(tmp_path: Path) -> None:
    columns = "n INT, f FLOAT, c DECIMAL(9, 2), d DATE, t TIMESTAMP, j JSON, x VARCHAR, e INT"
    place, times = duckdb_place(tmp_path), {"d": "2024-01-02", "t": "2024-01-02T03:04:05"}
    with duckdb.connect(place.path) as connection:
        connection.execute(f"CREATE TABLE t ({columns})")
    await staged_and_published(place, {"n": 2.0, "f": 0.1, "c": 0.1, **times, "j": {"a": [1]}, "x": 5, "e": None})
    assert rows_of(place, "n, c::VARCHAR, d::VARCHAR, j, x, e") == [(2, "0.10", "2024-01-02", '{"a":[1]}', "5", None)]


async def test_new_columns_in_duckdb(tmp_path: Path) -> None:
    parts, own = duckdb_parts.DuckdbParts(), {"execution_id": 5}
    place = duckdb_place(tmp_path, own=own)
    await staged_and_published(place, [{"n": 1}])
    fails = place.model_copy(update={"part": "1.each.1.1.1"})
    with pytest.raises(ToolError, match=r"has no column new; its columns: n. Write on_new_column: add or ignore"):
        await parts.stage(fails, [{"n": 2, "new": 2}])
    ignores = place.model_copy(update={"part": "1.each.1.2.1", "on_new_column": "ignore"})
    await staged_and_published(ignores, [{"n": 3, "New": 3, "other": 4}])
    assert rows_of(place) == [(1,), (3,)]
    adds = [place.model_copy(update={"part": f"1.each.1.{n}.1", "on_new_column": "add"}) for n in (3, 4, 5)]
    await parts.stage(adds[0], [{"n": 4, "new": 4}])
    await parts.stage(adds[1], [{"n": 5, "other": {"a": 1}, "Strange.name": "s"}])
    with pytest.raises(ToolError, match=r"column new is BIGINT and would change DOUBLE '2.5'"):
        await parts.stage(adds[2], [{"n": 6, "new": 2.5}])
    assert rows_of(place) == [(1,), (3,)]  # before the completion readers see nothing of it
    await parts.publish(place.target, adds[1:2])
    await parts.discard(place.target, [adds[0].part])
    assert rows_of(place, 'n, other.a, "Strange.name"') == [(1, None, None), (3, None, None), (5, 1, "s")]
    with duckdb.connect(place.path) as connection:  # the column of a part that was discarded is not there
        names = [row[0] for row in connection.execute("DESCRIBE t").fetchall()]
    assert names == ["n", "other", "Strange.name"]
    await staged_and_published(adds[0], [{"n": 4, "new": 4}])
    await parts.publish(place.target, adds[:2])
    assert rows_of(place, "n, new") == [(1, None), (3, None), (4, 4), (5, None)]


async def test_changes_that_wait_for_a_database_share_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails takes none of the others with it."""
    change, opened = duckdb_parts._change, duckdb_parts.open_file
    changes, connections = [], []

    async def counted(place: Any, work: Any) -> Any:
        changes.append(place)
        return await change(place, work)

    def held(path: str) -> duckdb.DuckDBPyConnection:
        connections.append(path)
        while len(connections) == 2 and len(changes) < 9:
            time.sleep(0.001)
        return opened(path)

    monkeypatch.setattr(duckdb_parts, "_change", counted)
    monkeypatch.setattr(duckdb_parts, "open_file", held)
    parts = duckdb_parts.DuckdbParts()
    first, *others = (duckdb_place(tmp_path, part=f"1.each.1.{n}.1") for n in range(9))
    await parts.stage(first, [{"n": 1}])  # the table has integers
    ends = await asyncio.gather(
        *(parts.stage(place, [{"n": n}]) for place, n in zip(others, [2.5, *range(2, 9)], strict=True)),
        return_exceptions=True,
    )
    assert len(connections) <= 3, "one for the first change, one that is held, one for those that waited"
    assert [type(end) for end in ends] == [ToolError, *[type(None)] * 7]
    assert len(await parts.staged(first.target, "1.each.1.")) == 8


CHANGING = """
workflow:
  - step: start
    tool:
      kind: python
      code: |
        def main():
            for part in range(4):
                yield [
                    {"n": n, "x": n, "z": None} if part < 2 else {"n": n, "x": n + 0.5, "late": f"r{n}", "z": [n]}
                    for n in range(100 * part, 100 * part + 100)
                ]
    sink: SINK
"""
ROWS = [
    {"n": n, "x": float(n), "late": None, "z": None} if n < 200 else {"n": n, "x": n + 0.5, "late": f"r{n}", "z": [n]}
    for n in range(400)
]


@pytest.fixture(params=[1024, 8 << 20], ids=["in parts", "at once"])
async def parted(settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """An engine whose results are stored in parts that are much smaller, or larger, than those of the tests."""
    engine = await Engine.open(settings.model_copy(update={"chunk_bytes": request.param}))
    yield engine
    await engine.close()


async def _ended(engine: Engine, sink: str, text: str = CHANGING) -> ExecutionState:
    state = await engine.run(playbook(text.replace("SINK", sink)))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return state


async def test_rows_of_parts_fill_columns_of_a_table_as_rows_at_once(parted: Engine) -> None:
    pool = parted.runtime.pool
    await pool.execute(
        "CREATE TABLE sunk (n int UNIQUE, x float8, late text DEFAULT 'none', z jsonb, execution_id bigint)"
    )
    state = await _ended(parted, "{tool: postgres, auth: pg, table: sunk, mode: upsert, key: [n]}")
    found = await pool.fetch("SELECT * FROM sunk ORDER BY n")
    assert [dict(row) for row in found] == [row | {"execution_id": state.execution_id} for row in ROWS]


async def test_rows_of_parts_are_in_duckdb_as_rows_at_once(parted: Engine, tmp_path: Path) -> None:
    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE named (n INT, x DOUBLE, late TEXT, z INT[], execution_id BIGINT)")
    await _ended(parted, f"{{tool: duckdb, database: {path}, table: made}}")
    state = await _ended(parted, f"{{tool: duckdb, database: {path}, table: named}}")
    with duckdb.connect(str(path)) as connection:
        columns = connection.execute("SELECT column_name, column_type FROM (DESCRIBE made)").fetchall()
        made = connection.execute("SELECT n, x, late, z FROM made ORDER BY n").fetchall()
        named = connection.execute("SELECT n, x, late, z FROM named ORDER BY n").fetchall()
        ids = connection.execute("SELECT DISTINCT execution_id FROM named").fetchall()
    assert dict(columns) == {"n": "BIGINT", "x": "DOUBLE", "z": "BIGINT[]", "late": "VARCHAR"}
    assert made == named == [(row["n"], row["x"], row["late"], row["z"]) for row in ROWS]
    assert ids == [(state.execution_id,)]


async def test_rows_of_parts_are_in_files_as_rows_at_once(parted: Engine, tmp_path: Path) -> None:
    await _ended(parted, f"{{tool: file, path: {tmp_path}/rows.parquet}}")
    await _ended(parted, f"{{tool: file, path: {tmp_path}/rows.jsonl}}")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert [str(field.type) for field in table.schema] == ["int64", "double", "list<element: int64>", "string"]
    assert table.to_pylist() == ROWS
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [{"late": None, **json.loads(line)} for line in lines] == ROWS


@pytest.mark.parametrize("parted", [1024], indirect=True)
async def test_a_large_result_never_stands_in_memory_for_its_sink(
    parted: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the store for the whole of a result that is in parts."""
    asked: list[ResultRef] = []
    get = ResultReader.get

    async def noting(reader: ResultReader, ref: ResultRef) -> Any:
        asked.append(ref)
        return await get(reader, ref)

    monkeypatch.setattr(ResultReader, "get", noting)
    await parted.runtime.pool.execute("CREATE TABLE sunk (n int)")
    text = """
workflow:
  - step: start
    tool: {kind: postgres, auth: pg, command: "SELECT n FROM generate_series(1, 600) AS n"}
    state: {key: n, initial: 0}
    sink: SINK
"""
    for sink in (
        "{tool: postgres, auth: pg, table: sunk}",
        f"{{tool: duckdb, database: {tmp_path}/rows.duckdb, table: sunk}}",
        f"{{tool: file, path: {tmp_path}/parts}}",
    ):
        await _ended(parted, sink, text)
    assert [ref for ref in asked if ref.kind is RefKind.MANIFEST] == []
    assert await parted.runtime.pool.fetchval("SELECT sum(n) FROM sunk") == 600 * 601 // 2
    with duckdb.connect(str(tmp_path / "rows.duckdb")) as connection:
        assert connection.execute("SELECT sum(n) FROM sunk").fetchall() == [(600 * 601 // 2,)]
    assert sum(pq.read_table(tmp_path / "parts")["n"].to_pylist()) == 600 * 601 // 2
