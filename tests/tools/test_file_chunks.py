"""Files and stored results in chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import ToolContext
from tests.tools.chunk_log import Killed, ListLog, rows_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chunks")]

ROWS = 750  # of 1 KB: three chunks
FORMATS = ["jsonl", "csv", "json", "parquet"]
every = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def mount(settings: Settings) -> Path:
    assert settings.pvc_mount_path is not None
    path = Path(settings.pvc_mount_path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, rows: int = ROWS, first: int = 0) -> Path:
    text = "x" * 1000
    records = [{"id": n, "text": text} for n in range(first, first + rows)]
    match path.suffix:
        case ".jsonl":
            path.write_bytes(b"\n".join(map(orjson.dumps, records)))
        case ".json":
            path.write_bytes(orjson.dumps(records))
        case ".csv":
            path.write_text("id,text\n" + "".join(f"{n},{text}\n" for n in range(first, first + rows)))
        case _:
            table = pa.Table.from_pylist(records, schema=pa.schema({"id": pa.int64(), "text": pa.string()}))
            pq.write_table(table, path, row_group_size=300)
    return path


async def ids(log: ListLog, box: ToolContext) -> list[int]:
    return [int(row["id"]) for rows in await log.rows(box) for row in rows]


@every
async def test_a_file_comes_in_chunks(run: Any, box: ToolContext, mount: Path, format: str) -> None:
    log = box.chunks = ListLog()
    path = write(mount / f"rows.{format}")

    result = await run("artifact", uri=str(path), format=format)

    assert await ids(log, box) == list(range(ROWS))
    assert len(log.chunks) >= 3
    value = await box.results.get(result.ref)
    assert isinstance(value, pa.Table) == (format == "parquet")
    assert [int(row["id"]) for row in rows_of(value)] == list(range(ROWS))


@every
async def test_an_object_does_too(run: Any, box: ToolContext, mount: Path, format: str) -> None:
    log = box.chunks = ListLog(wanted=True)
    uri = f"s3://{box.settings.minio_bucket}/files/{uuid4().hex}.{format}"
    await asyncio.to_thread(locations.copy_from_file, box.settings, write(mount / f"rows.{format}"), uri)

    await run("artifact", uri=uri)

    assert await ids(log, box) == list(range(ROWS))


@every
async def test_small_files_are_what_they_were(run: Any, box: ToolContext, mount: Path, format: str) -> None:
    log = box.chunks = ListLog()
    path = write(mount / f"rows.{format}", 2)

    value = (await run("artifact", uri=str(path))).data
    rows = (await run("artifact", uri=str(path), format=format)).data

    if format in ("parquet", "json"):
        assert len(value) == 2
    else:
        assert value == path.read_text()
    assert [int(row["id"]) for row in rows_of(rows)] == [0, 1]
    assert log.chunks == []
    empty = (await run("artifact", uri=str(write(mount / f"none.{format}", 0)), format=format)).data
    assert rows_of(empty) == []


async def test_a_large_array_comes_in_chunks_with_no_word_of_it(run: Any, box: ToolContext, mount: Path) -> None:
    log = box.chunks = ListLog()
    path = write(mount / "rows.json")

    result = await run("artifact", uri=str(path))

    assert len(log.chunks) >= 3
    assert await box.results.get(result.ref) == orjson.loads(path.read_bytes())
    path.write_bytes(b'{"rows": ' + path.read_bytes() + b"}")
    assert len((await run("artifact", uri=str(path))).data["rows"]) == ROWS


async def test_a_value_of_an_array_may_be_large_where_nobody_said_that_it_is_one(
    run: Any, box: ToolContext, mount: Path
) -> None:
    box.chunks = ListLog()
    text = "x" * (33 << 20)
    path = mount / "rows.json"
    path.write_bytes(orjson.dumps([{"id": 1, "text": text}, {"id": 2, "text": ""}]))

    value = await box.results.get((await run("artifact", uri=str(path))).ref)

    assert [(row["id"], len(row["text"])) for row in value] == [(1, len(text)), (2, 0)]
    box.chunks = ListLog()
    with pytest.raises(ToolError, match="more than 33554432 bytes"):
        await run("artifact", uri=str(path), format="json")
    box.chunks = ListLog(wanted=True)
    with pytest.raises(ToolError, match="more than 33554432 bytes"):
        await run("artifact", uri=str(path))


@every
async def test_reading_goes_on_where_it_stopped(
    run: Any, box: ToolContext, mount: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = box.chunks = ListLog(wanted=True)
    path = write(mount / f"rows.{format}")
    log.stops_after = 1
    with pytest.raises(Killed):
        await run("artifact", uri=str(path))
    log.stops_after = None
    compared = _told_of(box, monkeypatch)

    await run("artifact", uri=str(path))

    assert await ids(log, box) == list(range(ROWS))
    assert min(compared) == 1, "the first chunk is not read again"


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_a_file_that_has_changed_is_not_gone_on_with(
    run: Any, box: ToolContext, mount: Path, format: str
) -> None:
    log = box.chunks = ListLog(wanted=True)
    path = write(mount / f"rows.{format}")
    log.stops_after = 1
    with pytest.raises(Killed):
        await run("artifact", uri=str(path))
    log.stops_after = None
    write(path, first=1)

    with pytest.raises(ToolError, match="chunk 0 is not what it was"):
        await run("artifact", uri=str(path))


async def test_the_parts_of_a_stored_result_are_its_chunks(run: Any, box: ToolContext) -> None:
    parts = [await box.results.put([n, n], execution_id=7001, step="made", name=f"part-{n}") for n in range(3)]
    whole = await box.results.manifest(7001, "made", "whole", parts, "concat")
    each = await box.results.manifest(7001, "made", "each", parts, "append")
    log = box.chunks = ListLog(wanted=True)
    log.stops_after = 2
    with pytest.raises(Killed):
        await run("artifact", ref=whole.ref)
    log.stops_after = None

    await run("artifact", ref=whole.ref)

    assert await log.rows(box) == [[0, 0], [1, 1], [2, 2]]
    assert [chunk.more for chunk in log.chunks] == [True, True, False]
    log.chunks.clear()
    await run("artifact", ref=each.ref)
    assert await log.rows(box) == [[[0, 0], [1, 1], [2, 2]]]


async def test_a_file_that_is_not_there(run: Any, mount: Path) -> None:
    with pytest.raises(ToolError) as caught:
        await run("artifact", uri=str(mount / "none.parquet"))

    assert caught.value.code == "REFERENCE_NOT_AVAILABLE"


def _told_of(box: ToolContext, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of chunks that are stored from now on."""
    put, places = box.results.put, []

    async def watched(value: Any, **kept: Any) -> Any:
        places.append(int(kept["name"].rpartition("-")[2]))
        return await put(value, **kept)

    monkeypatch.setattr(box.results, "put", watched)
    return places


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("cut", [0, 9, 40, 1 << 16])
async def test_a_damaged_parquet_file(run: Any, box: ToolContext, mount: Path, wanted: bool, cut: int) -> None:
    box.chunks = ListLog(wanted=wanted)
    path = write(mount / "rows.parquet")
    content = path.read_bytes()
    path.write_bytes(content[:cut] if cut < 1 << 16 else b"PAR1" + bytes(len(content) - 200) + content[-196:])

    with pytest.raises(ToolError, match=r"rows\.parquet") as caught:
        await run("artifact", action="get", uri=str(path))

    assert caught.value.kind in ("parse", "storage")


async def test_a_damaged_json_file(run: Any, mount: Path) -> None:
    (mount / "value.json").write_text('{"a": ')

    with pytest.raises(ToolError, match=r"value\.json is not what its name or 'format' says") as caught:
        await run("artifact", action="get", uri=str(mount / "value.json"))

    assert caught.value.kind == "parse"


@pytest.mark.parametrize(("name", "content"), [("value.json", '{"n": %s}'), ("rows.jsonl", '{"n": %s}\n{"n": 1}\n')])
async def test_numbers_that_would_change(run: Any, mount: Path, name: str, content: str) -> None:
    (mount / name).write_text(content % "1234567890123456.7891")
    given = {"action": "get", "uri": str(mount / name)} | ({"format": "jsonl"} if name == "rows.jsonl" else {})

    with pytest.raises(ToolError, match=rf"{name}.*1234567890123456\.7891, which neither") as caught:
        await run("artifact", **given)
    assert caught.value.kind == "parse"

    for numbers, number in (("text", "1234567890123456.7891"), ("float", 1234567890123456.8)):
        data = (await run("artifact", numbers=numbers, **given)).data
        assert (data if isinstance(data, dict) else data[0])["n"] == number
