"""Bodies of rows: cut into chunks as they come, and on from where they broke off."""

from __future__ import annotations

import asyncio
import csv
import io
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows import cutters
from noetl_dagster.tools.rows.cutters import ArrayCutter, Piece, cutter_for
from noetl_dagster.tools.rows.formats import RowFormat
from tests.tools.chunk_log import Killed, ListLog
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chunks")]

ROWS = 750  # of 1 KB: three chunks
every = pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])


def asked(kind: str, **more: Any) -> dict[str, Any]:
    return {"as": kind, "count": ROWS, **more}


async def ids(log: ListLog, box: ToolContext) -> list[int]:
    return [int(row["id"]) for rows in await log.rows(box) for row in rows]


@every
async def test_a_body_of_rows_is_a_list_or_chunks(run: Any, box: ToolContext, server: str, kind: str) -> None:
    log = box.chunks = ListLog()

    small = await run("http", url=f"{server}/rows", params={"as": kind, "count": 2}, format=kind)
    assert (small.data["status_code"], [str(row["id"]) for row in small.data["data"]]) == (200, ["0", "1"])
    assert small.details["http"]["status"] == 200
    assert log.chunks == []
    large = await run("http", url=f"{server}/rows", params=asked(kind), format=kind)

    assert await ids(log, box) == list(range(ROWS))
    assert len(log.chunks) == 3
    assert large.ref.rows == ROWS


async def test_a_body_is_what_it_was_where_nobody_speaks_of_rows(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog()
    box.settings = box.settings.model_copy(update={"http_body_bytes": 62_500})

    small = await run("http", url=f"{server}/rows", params={"as": "jsonl", "count": 2})
    large = await run("http", url=f"{server}/rows", params=asked("jsonl"))

    assert small.data["data"].count("\n") == 2
    assert large.data["encoding"] == "reference"
    assert log.chunks == []


@every
async def test_a_step_that_takes_chunks_gets_rows_of_what_its_type_says_has_some(
    run: Any, box: ToolContext, server: str, kind: str
) -> None:
    log = box.chunks = ListLog(wanted=True)

    await run("http", url=f"{server}/rows", params={"as": kind, "count": 3})

    assert await ids(log, box) == [0, 1, 2]
    assert [chunk.more for chunk in log.chunks] == [False]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/csv", "id,name\n"),
        ("text/csv", "<html>error</html>"),
        ("application/x-ndjson", ""),
        ("application/json", "[]"),
    ],
)
async def test_a_body_without_rows_is_one_chunk_of_none(
    run: Any, box: ToolContext, server: str, kind: str, body: str
) -> None:
    log = box.chunks = ListLog(wanted=True)

    result = await run("http", url=f"{server}/as", params={"type": kind, "body": body})

    assert [(chunk.ref.rows, chunk.more) for chunk in log.chunks] == [(0, False)]
    assert await log.rows(box) == [[]]
    whole = await box.results.get(result.ref)
    assert (whole["status_code"], whole["data"]) == (200, [])


@every
async def test_the_rest_is_asked_for_after_a_restart(run: Any, box: ToolContext, server: str, kind: str) -> None:
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 1
    with pytest.raises(Killed):
        await run("http", url=f"{server}/rows", params=asked(kind, ranges=1))
    log.stops_after = None

    result = await run("http", url=f"{server}/rows", params=asked(kind, ranges=1))

    assert await ids(log, box) == list(range(ROWS))
    assert len(log.chunks) == 3
    assert result.details["http"]["status"] == 200
    assert int(result.details["http"]["headers"]["x-sent"]) == log.chunks[0].position["offset"] > 250_000


@pytest.mark.parametrize("wanted", [True, False])
async def test_one_whose_last_chunk_is_in_the_log_is_not_asked_for(
    run: Any, box: ToolContext, server: str, wanted: bool
) -> None:
    box.chunks = ListLog(wanted=wanted)
    first = await run("http", url=f"{server}/rows", params=asked("jsonl"), format="jsonl")

    again = await run("http", url=f"{server}/status/404", format="jsonl")

    assert await box.results.get(again.ref) == await box.results.get(first.ref)


async def test_a_broken_connection_leaves_what_was_told(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog(wanted=True)
    url = f"{server}/rows"
    with pytest.raises(ToolError) as caught:
        await run("http", url=url, params=asked("json", ranges=1, cut=560_000))

    assert caught.value.retryable
    assert [chunk.more for chunk in log.chunks] == [True]
    await run("http", url=url, params=asked("json", ranges=1))
    assert await ids(log, box) == list(range(ROWS))


async def test_without_ranges_it_is_read_again_and_compared(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 2
    with pytest.raises(Killed):
        await run("http", url=f"{server}/rows", params=asked("csv"))
    log.stops_after = None

    result = await run("http", url=f"{server}/rows", params=asked("csv"))

    assert result.details["http"]["headers"]["x-sent"] == "0"
    assert await ids(log, box) == list(range(ROWS))


async def test_another_version_is_read_from_its_beginning(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 1
    with pytest.raises(Killed):
        await run("http", url=f"{server}/rows", params=asked("jsonl", ranges=1))
    log.stops_after = None

    with pytest.raises(ToolError, match="is not what it was"):
        await run("http", url=f"{server}/rows", params=asked("csv", ranges=1, tag=2))


async def test_reading_waits_for_room(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog(wanted=True, room=0)
    running = asyncio.ensure_future(run("http", url=f"{server}/rows", params=asked("jsonl"), timeout=1))
    await until(lambda: len(log.chunks) == 1)
    await asyncio.sleep(1.2)  # longer than the server may take for a part of its answer
    assert len(log.chunks) == 1

    await log.make_room(None)
    await running
    assert await ids(log, box) == list(range(ROWS))


async def test_formats_of_no_rows_are_refused(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="format parquet is none of rows; write one of csv, json, jsonl"):
        await run("http", url=f"{server}/rows", format="parquet")
    with pytest.raises(ToolError, match=r"GET http://.*/text, line 1: no JSON"):
        await run("http", url=f"{server}/text", format="jsonl")
    with pytest.raises(ToolError, match=r"GET http://.*, from byte 0 on: no JSON array"):
        await run("http", url=f"{server}/text", format="json")


async def test_a_large_array_is_rows_with_no_word_of_it(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog()
    small = await run("http", url=f"{server}/rows", params={"as": "json", "count": 2})

    large = await run("http", url=f"{server}/rows", params=asked("json"))

    assert await ids(log, box) == list(range(ROWS))
    assert [chunk.more for chunk in log.chunks] == [True, True, False]
    value = await box.results.get(large.ref)
    assert [row["id"] for row in value["data"]] == list(range(ROWS))
    assert value.keys() == small.data.keys()
    assert small.data["data"] == value["data"][:2]


async def test_a_large_value_of_an_array_is_not_cut(run: Any, box: ToolContext, server: str) -> None:
    log = box.chunks = ListLog()
    value = [{"items": ["x" * 1000] * 560}]
    whole = await run("http", method="POST", url=f"{server}/same", json=value)
    box.settings = box.settings.model_copy(update={"http_body_bytes": 312_500})

    stored = await run("http", method="POST", url=f"{server}/same", json=value)

    assert whole.data["data"] == value
    assert stored.data["encoding"] == "reference"
    assert await box.results.get(stored.data["data"]["ref"]) == value
    assert log.chunks == []


@pytest.mark.parametrize(("end", "wanted"), [("", False), (",]", True), ("] []", False), (r',"\ud800"]', True)])
async def test_a_broken_array_is_no_result(run: Any, box: ToolContext, server: str, end: str, wanted: bool) -> None:
    log = box.chunks = ListLog(wanted=wanted)

    with pytest.raises(ToolError, match=r"from byte [1-9]\d* on: no JSON array") as caught:
        await run("http", url=f"{server}/rows", params=asked("json", end=end))

    assert caught.value.kind == "parse"
    assert all(chunk.more for chunk in log.chunks)


QUOTED = '\ufeffid,text\r\n1,"a\r\nb, ""c"""\r\n\r\n2,\r\n3,\r\n4,é\r\n5,5" pipe'.encode()
LINES = b'{"id": 1}\n\n{"id": "\\n"}\r\n[2]\n"x"'


ARRAY = b'\n[{"id": 0, "id": 1, "a,": [1, {}]},"\\\\\\"]" ,\n [2,3],4, 18446744073709551616,null ]\n'


@pytest.mark.parametrize(
    ("format", "content", "rows"),
    [
        (
            RowFormat.CSV,
            QUOTED,
            [
                {"id": "1", "text": 'a\r\nb, "c"'},
                {"id": "2", "text": None},
                {"id": "3", "text": None},
                {"id": "4", "text": "é"},
                {"id": "5", "text": '5" pipe'},
            ],
        ),
        (RowFormat.JSONL, LINES, [{"id": 1}, {"id": "\n"}, [2], "x"]),
        (RowFormat.JSON, ARRAY, [{"id": 1, "a,": [1, {}]}, '\\"]', [2, 3], 4, 2.0**64, None]),
    ],
)
@pytest.mark.parametrize("size", [1, 12, 40, 1000])
def test_pieces_are_the_same_however_the_bytes_come(
    format: RowFormat, content: bytes, rows: list[Any], size: int
) -> None:
    def pieces(step: int, offset: int = 0, columns: list[str] | None = None) -> list[Piece]:
        cutter = cutter_for(format, size, {"offset": offset, "columns": columns}, "f", numbers=Numbers.FLOAT)
        found = [
            piece for start in range(offset, len(content), step) for piece in cutter.feed(content[start : start + step])
        ]
        return [*found, *filter(None, [cutter.end()])]

    whole = pieces(len(content))

    assert [row for piece in whole for row in piece.rows] == rows
    assert len(whole) == 1 or size < len(content)
    for step in range(1, 20):
        assert pieces(step) == whole
    columns = ["id", "text"] if format is RowFormat.CSV else None
    for place, piece in enumerate(whole[:-1]):
        assert pieces(5, piece.offset, columns) == whole[place + 1 :]


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        (RowFormat.JSONL, b'{"a": 1}\n\n{"b"\n', 'f, line 3: no JSON .*: {"b"'),
        (RowFormat.JSONL, b'{"a": "%s"}\n1,2\n' % (b"x" * 1000), "f, line 1 after byte 1010: no JSON"),
        (RowFormat.CSV, b'a,b\n"1\n",2\n1,2,3\n', "f, line 4: a CSV row has 3 values for 2 columns"),
        (RowFormat.CSV, b"a,b\n1\n", "f, line 2: a CSV row has 1 values for 2 columns"),
        (RowFormat.CSV, b"%s,b\n1\n" % (b"a" * 1000), "f, line 1 after byte 1003: a CSV row has 1 values"),
        (RowFormat.CSV, b"a,b,a\n1,2,3\n", "f, line 1: the header names column 'a' twice"),
        (
            RowFormat.CSV,
            b"a,,\n1,,\n2,,x\n",
            "f, line 3: 'x' stands in column 3, which the header does not name",
        ),
        (
            RowFormat.CSV,
            b'a,b\n1,"c"\n"2" ,d\n',
            "f, line 3: blanks follow the closing quote of the value at byte 10",
        ),
        (
            RowFormat.CSV,
            b'a,b\n1,"c"\t\r\n',
            "f, line 2: blanks follow the closing quote of the value at byte 6",
        ),
        (RowFormat.CSV, b"a\n\xff\n", "f, from byte 0 on: no CSV"),
        (RowFormat.CSV, b'a\n"' + b"x\n" * (17 << 11), "f, line 2: the quote at byte 2 opens"),
        (RowFormat.CSV, b'a,b\n1,"c\n2,d\n', "f, line 2: the quote at byte 6 opens"),
        (RowFormat.CSV, b'a,b\n1,"c"\n2,"d', "f, line 3: the quote at byte 12 opens"),
        (RowFormat.CSV, b'a,b\n1,"c\n2,"d"\n', "f, line 2: the quote at byte 6 opens"),
        (RowFormat.CSV, b'"a";"b"\n"1";"2"\n', "f, line 1: the quote at byte 0 opens"),
        (RowFormat.CSV, b"a" * (33 << 11), "f, from byte 0 on: a record of more than"),
        (RowFormat.JSON, b"", "no JSON array"),
        (RowFormat.JSON, b'{"a": [1, 2]}', "another value"),
        (RowFormat.JSON, b"[1, 2", "no JSON array"),
        (RowFormat.JSON, b'["%s",]' % (b"x" * 1000), "missing after a comma"),
        (RowFormat.JSON, b"[1] [2]", "no JSON array"),
        (RowFormat.JSON, b'["\xff"]', "no JSON array"),
        (RowFormat.JSON, b'["' + b"x" * (33 << 11), "quote or bracket that is never closed"),
    ],
)
def test_what_is_not_of_the_format_is_refused(
    format: RowFormat, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutters, "RECORD_BYTES", 1 << 16)
    cutter = cutter_for(format, 1000, {}, "f", longest=1 << 16)

    with pytest.raises(ToolError, match=message):
        [*cutter.feed(content), cutter.end()]


@pytest.mark.parametrize("size", [1, 1000])
def test_columns_without_name_and_values_are_none(size: int) -> None:
    cutter = cutter_for(RowFormat.CSV, size, {}, "f")

    pieces = [*cutter.feed(b"a,,b,\n1,,2,\n3,,4,\n"), cutter.end()]

    rows = [row for piece in pieces if piece is not None for row in piece.rows]
    assert rows == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


@given(st.lists(st.lists(st.text('a",\r\n'), min_size=2, max_size=2)), st.booleans(), st.integers(1, 60))
def test_csv_is_read_as_it_was_written(rows: list[list[str]], all_quoted: bool, size: int) -> None:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL)
    writer.writerows([["one", "two"], *rows])
    cutter = cutter_for(RowFormat.CSV, size, {}, "f")

    pieces = [*cutter.feed(text.getvalue().encode()), cutter.end()]

    found = [row for piece in pieces if piece is not None for row in piece.rows]
    assert found == [{"one": one or None, "two": two or None} for one, two in rows]


@pytest.mark.parametrize("step", [5_000, 50_000])
@pytest.mark.parametrize(
    ("format", "content"),
    [
        (RowFormat.CSV, b"id\n" + b"1\n" * 22_500),
        (RowFormat.JSONL, b"[1]\n" * 22_500),
        (RowFormat.JSON, b"[" + b'{"a": 1},' * 22_499 + b"2]"),
    ],
)
def test_small_rows_are_a_piece_by_their_number(
    format: RowFormat, content: bytes, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutters, "CHUNK_ROWS", 5_000)
    monkeypatch.setattr(cutters, "_BLOCK", 100_000)
    cutter = cutter_for(format, 1 << 30, {}, "f", numbers=Numbers.FLOAT)

    pieces = [piece for at in range(0, len(content), step) for piece in cutter.feed(content[at : at + step])]
    pieces += filter(None, [cutter.end()])

    assert sum(len(piece.rows) for piece in pieces) == 22_500
    assert all(len(piece.rows) >= 4_999 for piece in pieces[:-1])
    assert max(len(piece.rows) for piece in pieces) < 5_000 + 100_000 // 9
    for piece, following in pairwise(pieces):
        rest = cutter_for(
            format, 1 << 30, {"offset": piece.offset, "columns": cutter.columns}, "f", numbers=Numbers.FLOAT
        )
        again = next(rest.feed(content[piece.offset :]), None) or rest.end()
        assert again is not None
        assert again.offset == following.offset


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text('ab"\\[]{},é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\{,'), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=8), st.integers(1, 60), st.integers(1, 60), st.booleans())
def test_any_array_is_cut_as_orjson_reads_it(rows: list[Any], size: int, step: int, pretty: bool) -> None:
    content = orjson.dumps(rows, option=orjson.OPT_INDENT_2 if pretty else None)

    assert _cut(content, size, step) == orjson.loads(content)


@given(st.lists(VALUES, min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 30), st.data())
def test_what_is_no_array_is_never_whole(rows: list[Any], size: int, step: int, data: st.DataObject) -> None:
    content = bytearray(orjson.dumps(rows))
    place = data.draw(st.integers(0, len(content) - 1))
    broken = data.draw(
        st.sampled_from([content[:place], content + content[place:], content[:place] + content[place + 1 :]])
    )
    try:
        expected = orjson.loads(broken)
    except orjson.JSONDecodeError:
        expected = None

    if isinstance(expected, list):
        assert _cut(bytes(broken), size, step) == expected
    else:
        with pytest.raises(ToolError):
            _cut(bytes(broken), size, step)


def _cut(content: bytes, size: int, step: int) -> list[Any]:
    cutter = ArrayCutter(size, name="f", numbers=Numbers.FLOAT)  # as orjson reads them
    pieces = [piece for at in range(0, len(content), step) for piece in cutter.feed(content[at : at + step])]
    return [row for piece in (*pieces, cutter.end()) if piece is not None for row in piece.rows]
