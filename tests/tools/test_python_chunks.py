"""Generators of python code: rows in chunks, as fast as they are stored, and on from where they stopped."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolContext
from tests.tools.chunk_log import Killed, ListLog
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chunks")]

THREAD, PROCESS = {}, {"isolation": "subprocess"}
everywhere = pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "subprocess"])

MAIN = "def main(n):\n    for i in range(n):\n        yield [{'i': i}]"
WAYS = [
    MAIN,
    "async def main(n):\n    for i in range(n):\n        yield {'i': i}",
    "for i in range(n):\n    yield {'i': i}",
    "def rows():\n    for i in range(n):\n        yield {'i': i}\nresult = rows()",
    "result = ({'i': i} for i in range(n))",
    "async def main(n):\n    return ({'i': i} for i in range(n))",
]


@pytest.mark.parametrize(
    ("code", "options"), [*((way, THREAD) for way in WAYS), *((way, PROCESS) for way in (WAYS[1], WAYS[5]))]
)
async def test_rows_are_a_list_or_a_chunk_for_each_yield(run: Any, box: ToolContext, code: str, options: Any) -> None:
    log = box.chunks = ListLog()
    rows = [{"i": 0}, {"i": 1}, {"i": 2}]

    assert (await run("python", code=code, input={"n": 3}, options=options)).data == rows
    assert log.chunks == []
    log.takes = True  # a step takes them
    result = await run("python", code=code, input={"n": 3}, options=options)

    assert await log.rows(box) == [[row] for row in rows]
    assert [chunk.more for chunk in log.chunks] == [True, True, False]
    assert await box.results.get(result.ref) == rows


@everywhere
async def test_small_rows_are_a_chunk_by_their_number(run: Any, box: ToolContext, options: Any) -> None:
    log = box.chunks = ListLog()

    code = "for i in range(n):\n    yield list(range(10_000))"
    result = await run("python", code=code, input={"n": 12}, options=options)

    assert [chunk.ref.rows for chunk in log.chunks] == [50_000, 50_000, 20_000]
    assert result.ref.rows == 120_000


async def test_lists_and_tables_are_rows_and_all_else_is_one(run: Any, box: ToolContext) -> None:
    code = """
        import pandas, pyarrow

        def main():
            yield [1, 2]
            yield (3, 4)
            yield []
            yield pandas.DataFrame({"a": [5, 6]})
            yield pyarrow.table({"a": [7]})
            yield "text"
    """
    log = box.chunks = ListLog(wanted=True)

    await run("python", code=textwrap.dedent(code))

    assert await log.rows(box) == [[1, 2], [[3, 4]], [{"a": 5}, {"a": 6}], [{"a": 7}], ["text"]]


@everywhere
async def test_a_small_table_is_one_table(run: Any, box: ToolContext, options: Any) -> None:
    code = "import pyarrow\nfor i in range(3):\n    yield pyarrow.table({'i': [i]})"

    result = await run("python", code=code, options=options)

    assert isinstance(result.data, pa.Table)
    assert result.data.to_pylist() == [{"i": 0}, {"i": 1}, {"i": 2}]


@everywhere
async def test_nothing_yielded_is_an_empty_list(run: Any, box: ToolContext, options: Any) -> None:
    box.chunks = ListLog(wanted=True)

    assert (await run("python", code=MAIN, input={"n": 0}, options=options)).data == []


@everywhere
async def test_a_generator_waits_for_room(run: Any, box: ToolContext, options: Any, tmp_path: Path) -> None:
    log = box.chunks = ListLog(wanted=True, room=0)
    made = tmp_path / "made"
    made.mkdir()
    code = """
        from pathlib import Path

        def main(seen):
            for i in range(8):
                Path(seen, str(i)).touch()
                yield i
    """
    running = asyncio.ensure_future(
        run("python", code=textwrap.dedent(code), input={"seen": str(made)}, options=options)
    )
    await until(lambda: len(log.chunks) == 1)  # and nobody takes it
    await asyncio.sleep(0.3)
    waiting = len(list(made.iterdir()))
    await log.make_room(None)

    assert len(await box.results.get((await running).ref)) == 8
    # the one that is told of, the one that was stored to know that it follows, and the one that is made meanwhile
    assert waiting == 3


@everywhere
async def test_a_rest_of_less_than_a_chunk_follows_the_chunks_of_an_earlier_run(
    run: Any, box: ToolContext, options: Any
) -> None:
    log = box.chunks = ListLog()
    code = "for i in range(position or 0, 30):\n    yield [{'i': i, 'text': 'x' * 31_250}], i + 1"
    log.stops_after = 3
    with pytest.raises(Killed):
        await run("python", code=code, options=options)
    log.stops_after = None

    result = await run("python", code=code, options=options)

    assert [len(rows) for rows in await log.rows(box)] == [9, 9, 9, 3]
    assert [row["i"] for row in await box.results.get(result.ref)] == list(range(30))


SEEKS = "def main(position):\n    for i in range(position or 0, 5):\n        print(i)\n        yield [i], i + 1"


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (SEEKS, THREAD),
        (SEEKS, PROCESS),
        ("for i in range(position or 0, 5):\n    print(i)\n    yield [i], i + 1", THREAD),
        ("async " + SEEKS, THREAD),
    ],
)
async def test_one_that_asks_for_its_position_goes_on_there(
    run: Any, box: ToolContext, code: str, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 2
    with pytest.raises(Killed):
        await run("python", code=code, options=options)
    log.stops_after = None
    caplog.clear()
    caplog.set_level("INFO", logger="noetl_dagster.tools.python.output")

    result = await run("python", code=code, options=options)

    assert [record.message for record in caplog.records] == ["stage: 2", "stage: 3", "stage: 4"]
    assert await box.results.get(result.ref) == [0, 1, 2, 3, 4]
    assert [chunk.position for chunk in log.chunks] == [1, 2, 3, 4, 5]
    again = await run("python", code=code.replace("print(i)", "raise ValueError"), options=options)
    assert await box.results.get(again.ref) == [0, 1, 2, 3, 4]


@everywhere
async def test_any_other_begins_again_and_what_is_stored_is_skipped(run: Any, box: ToolContext, options: Any) -> None:
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 2
    with pytest.raises(Killed):
        await run("python", code=MAIN, input={"n": 4}, options=options)
    before, log.stops_after = tuple(log.chunks), None

    result = await run("python", code=MAIN, input={"n": 4}, options=options)

    assert [chunk.index for chunk in log.chunks] == [0, 1, 2, 3]
    assert tuple(log.chunks[:2]) == before
    assert [row["i"] for row in await box.results.get(result.ref)] == [0, 1, 2, 3]


@everywhere
async def test_an_error_half_way_leaves_what_was_told(run: Any, box: ToolContext, options: Any) -> None:
    log = box.chunks = ListLog(wanted=True)
    code = "for i in range(4):\n    if i == 3:\n        raise KeyError('lost')\n    yield i"

    with pytest.raises(ToolError, match="KeyError: 'lost'") as caught:
        await run("python", code=code, options=options)

    assert caught.value.details["py"] == {"exception_type": "KeyError", "line": 3}
    assert await log.rows(box) == [[0], [1]]  # whether one follows the third will never be known
    assert all(chunk.more for chunk in log.chunks)


@pytest.mark.parametrize(("kind", "options"), [("def", THREAD), ("async def", THREAD), ("def", PROCESS)])
async def test_a_cancelled_generator_is_closed(
    run: Any, box: ToolContext, options: Any, kind: str, tmp_path: Path
) -> None:
    log = box.chunks = ListLog(wanted=True, room=0)
    code = f"""
        from pathlib import Path

        {kind} main(closed):
            try:
                for i in range(8):
                    yield i
            finally:
                Path(closed).touch()
    """
    closed = tmp_path / "closed"
    running = asyncio.ensure_future(
        run("python", code=textwrap.dedent(code), input={"closed": str(closed)}, options=options)
    )
    await until(lambda: len(log.chunks) == 1)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    if not options:  # a process is killed
        await until(closed.exists)
    await log.make_room(None)
    await asyncio.sleep(0.1)
    assert len(log.chunks) == 1


@everywhere
async def test_the_time_limit_holds_while_a_chunk_waits_for_room(run: Any, box: ToolContext, options: Any) -> None:
    box.chunks = ListLog(wanted=True, room=0)

    with pytest.raises(ToolError, match="longer than its timeout of 1 s"):
        await run("python", code=MAIN, input={"n": 5}, options=options, timeout=1)


@everywhere
async def test_code_that_asks_for_its_position_yields_pairs(run: Any, box: ToolContext, options: Any) -> None:
    with pytest.raises(ToolError, match="yields pairs, 'yield rows, position'; it gave a list"):
        await run("python", code="def main(position):\n    yield [1]", options=options)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("position = 3\nfor i in range(2): yield i, position", [[0, 3], [1, 3]]),
        ("def main(position=7):\n    return position", 7),
        ("for i in range(2): yield i, source.position", [[0, 4], [1, 4]]),
    ],
)
async def test_other_things_may_be_called_position(run: Any, code: str, value: Any) -> None:
    prefix = "import types; source = types.SimpleNamespace(position=4)\n"

    assert (await run("python", code=prefix + code)).data == value
    given = await run("python", code="for i in [1]: yield i, position", input={"position": 5})
    assert given.data == [[1, 5]]
