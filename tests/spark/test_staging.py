"""Objects on local disk for the JVM's own readers and writers: the same rows as through the data source."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from noetl_dagster.errors import IntegrityError, ToolError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark import results as results_module
from noetl_dagster.spark import staging as staging_module
from noetl_dagster.spark.datasets import Layout, WrittenDataset, register, write_dataset
from noetl_dagster.spark.frames import InputRows, stored_frame
from noetl_dagster.spark.sessions import activate, own_session
from noetl_dagster.spark.staging import Staging, StagingStoppedError, staging_for, staging_root, sweep
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import ToolContext
from tests.spark.conftest import Run, put

pytestmark = pytest.mark.spark

VALUES: list[Any] = [
    {"n": 1.0, "text": "ä\u2028\r\n\x85 end"},
    [1, [2, 3]],
    "line\nbreak",
    None,
    12345678901234567890,
    {},
]
ODD = ["F001", "a b/c=d%e", "ü", "", None, "1"]


@pytest.fixture
def session(spark: SparkSession, settings: Settings) -> SparkSession:
    return own_session(spark, settings, "staging", "staging")


@pytest.fixture
def staging(session: SparkSession, settings: Settings) -> Iterator[Staging]:
    found = staging_for(session, settings)
    assert found is not None
    yield found
    found.close()
    assert list(staging_root(settings).iterdir()) == []


async def rows_of(box: ToolContext, *refs: ResultRef, depth: int = 1) -> InputRows:
    rows = InputRows()
    for ref in refs:
        await rows.add(ref, box.results, depth=depth)
    return rows


async def both_ways(session: SparkSession, rows: InputRows, box: ToolContext, staging: Staging) -> tuple[list, list]:
    def collect(way: Staging | None) -> list:
        frame = stored_frame(session, box.settings, rows, way)
        assert ("noetl_results" in frame._jdf.queryExecution().toString()) == (way is None)
        return [tuple(row) for row in frame.collect()]

    return await asyncio.to_thread(collect, staging), await asyncio.to_thread(collect, None)


async def test_json_and_text_give_the_same_rows_in_the_same_order(
    box: ToolContext, session: SparkSession, staging: Staging
) -> None:
    text = "\ufeffone\n\ntwo\u2028three\r\nfour"
    refs = [
        await put(box, text, "text", content_type="text/plain"),
        await put(box, VALUES, "plain"),
        await put(box, VALUES[::-1], "gzip", compression="gzip"),
        await put(box, [], "none"),
        await put(box, {"only": 1}, "one", compression="lz4"),
        *[await put(box, [number, -number], f"n{number}") for number in (2, 10, 1)],
    ]
    staged, read = await both_ways(session, await rows_of(box, *refs), box, staging)
    assert staged == read
    assert [row[0] for row in staged][:5] == ["\ufeffone", "", "two", "three", "four"]
    assert orjson.loads(staged[5][0]) == VALUES[0]


async def test_lists_of_lists_give_their_elements(box: ToolContext, session: SparkSession, staging: Staging) -> None:
    ref = await put(box, [[1, [2]], [], [{"a": 3}], 4], "bundle")
    staged, read = await both_ways(session, await rows_of(box, ref, depth=2), box, staging)
    assert staged == read == [("1",), ("[2]",), ('{"a":3}',), ("4",)]


async def test_a_dataset_is_the_same_whoever_writes_and_reads_it(
    box: ToolContext, session: SparkSession, staging: Staging
) -> None:
    await box.results.ready(StoreTier.MINIO)
    layout = Layout(tier=StoreTier.MINIO, partition_by=("part", "day"))

    def made() -> DataFrame:
        parts = session.createDataFrame(list(enumerate(ODD)), "id INT, part STRING")
        return parts.selectExpr(
            "id", "part", "timestamp'2024-01-02 03:04:05.678901' + make_dt_interval(id) AS at",
            "date'2024-02-29' AS day", "cast(id AS decimal(9,2)) AS amount", "array(id, null) AS both",
        )  # fmt: skip

    async def write(way: Staging | None, name: str) -> ResultRef:
        uri = box.results.dataset_uri(execution_id=1, step="made", name=name, tier=StoreTier.MINIO)

        def work() -> WrittenDataset:
            activate(session)
            return write_dataset(made(), box.settings, uri, layout, way)

        written = await asyncio.to_thread(work)
        return await register(written, box.results, layout, execution_id=1, step="made", name=name)

    refs = [await write(staging, "staged"), await write(None, "direct")]
    folders = [sorted({name.rpartition("/")[0] for name in ref.extra["files"]}) for ref in refs]
    assert folders[0] == folders[1]
    assert "part=a%20b%2Fc%3Dd%25e/day=2024-02-29" in folders[0]
    assert set(refs[0].extra["sha256"]) == set(refs[0].extra["files"])
    expected = sorted(map(repr, (tuple(row) for row in made().collect())))
    for ref in refs:
        rows = await rows_of(box, ref)
        for way in (staging, None):
            frame = await asyncio.to_thread(stored_frame, session, box.settings, rows, way)
            assert frame.columns == ["id", "part", "at", "day", "amount", "both"]
            assert sorted(map(repr, (tuple(row) for row in frame.collect()))) == expected
    tables = [await box.results.get(ref) for ref in refs]
    assert tables[0].schema.field("at").type == tables[1].schema.field("at").type
    assert sorted(tables[0]["part"].to_pylist(), key=repr) == sorted(tables[1]["part"].to_pylist(), key=repr)


@pytest.mark.parametrize(
    "query",
    ["SELECT 1 AS a, null AS nothing", "SELECT 1 AS a, 2 AS A"],
)
async def test_what_the_jvm_would_write_otherwise_goes_through_the_data_source(run: Run, query: str) -> None:
    made = await run(command=query, tier="minio")
    assert made.ref is not None
    assert made.ref.rows == 1
    assert "sha256" not in made.ref.extra


async def test_a_dataset_without_rows_has_no_files(run: Run) -> None:
    made = await run(command="SELECT id FROM range(0)", tier="minio")
    assert made.ref is not None
    assert (made.ref.rows, made.ref.extra["files"]) == (0, [])
    read = await run(command="SELECT count(*) AS n FROM made", input={"made": made.ref}, collect=True)
    assert read.data["rows"] == [{"n": 0}]


async def test_damage_is_named_and_nothing_stays_on_disk(run: Run, box: ToolContext) -> None:
    ref = await put(box, [{"n": 1}], "x")
    await asyncio.to_thread(overwrite, box.settings, ref.physical_uri, b'[{"n": 2}]')
    with pytest.raises(ToolError, match=r"spark in step crunch.*: the bytes at .* were changed or damaged") as caught:
        await run(code="result = rows.count()", input={"rows": ref})
    assert not caught.value.retryable
    made = await run(code="result = spark.range(9)", tier="minio")
    assert made.ref is not None
    name = made.ref.extra["files"][0]
    await asyncio.to_thread(overwrite, box.settings, f"{made.ref.physical_uri.rstrip('/')}/{name}", b"PAR1")
    with pytest.raises(ToolError, match="parquet were changed or damaged"):
        await run(code="result = rows.count()", input={"rows": made.ref})
    await box.results.delete(ref)
    with pytest.raises(ToolError, match="nothing is at"):
        await run(code="result = rows.count()", input={"rows": ref})
    assert list(staging_root(box.settings).iterdir()) == []


def overwrite(settings: Settings, uri: str, data: bytes) -> None:
    locations.bucket_of(settings, uri).write(locations.object_key(uri), BytesIO(data), len(data))


async def test_large_objects_are_left_to_sparks_processes(
    box: ToolContext, session: SparkSession, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await rows_of(box, await put(box, ["x" * 100], "large"))
    monkeypatch.setattr(staging_module, "LARGEST", 50)
    assert staging.lines(rows.parts) is None
    frame = await asyncio.to_thread(stored_frame, session, box.settings, rows, staging)
    assert frame.count() == 1
    monkeypatch.setattr(staging_module, "LARGEST", 5000)
    monkeypatch.setattr(staging_module, "SHARE_OF_DISK", 2**60)
    assert staging.lines(rows.parts) is None


async def test_bytes_that_wait_are_bounded(box: ToolContext, staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects there are, those that are fetched and not yet written stay below the bound."""
    refs = [await put(box, ["x" * 1000] * 10, f"o{number}", StoreTier.PVC) for number in range(40)]
    rows = await rows_of(box, *refs)
    size = rows.parts[0].bytes_size
    monkeypatch.setattr(staging_module, "AHEAD", 3 * size)
    fetched, most, written = [], 0, 0
    fetch, cut = results_module.verified_bytes, staging_module.lines_of

    def counted(*args: Any) -> bytes:
        nonlocal most
        fetched.append(1)
        most = max(most, len(fetched) - written)
        return fetch(*args)

    def lines_of(*args: Any) -> bytes:
        nonlocal written
        written += 1
        return cut(*args)

    monkeypatch.setattr(results_module, "verified_bytes", counted)
    monkeypatch.setattr(staging_module, "lines_of", lines_of)
    staging.lines(rows.parts)
    assert written == 40
    assert most <= 5


async def test_a_call_that_is_cancelled_while_it_publishes_leaves_nothing(
    box: ToolContext, session: SparkSession, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.results.ready(StoreTier.MINIO)
    uri = box.results.dataset_uri(execution_id=1, step="made", name="x", tier=StoreTier.MINIO)
    real = locations.copy_from_file

    def stopped_after_the_first(*args: Any) -> str:
        digest = real(*args)
        staging.stop()
        return digest

    monkeypatch.setattr(locations, "copy_from_file", stopped_after_the_first)
    layout = Layout(tier=StoreTier.MINIO)
    with pytest.raises(StagingStoppedError):
        await asyncio.to_thread(write_dataset, session.range(40), box.settings, uri, layout, staging)
    assert locations.file_sizes(box.settings, uri) == {}


def test_folders_of_killed_processes_are_swept(settings: Settings) -> None:
    script = (
        "import os, sys, pathlib, signal; from noetl_dagster.settings import Settings; "
        "from noetl_dagster.spark.staging import Staging; "
        "Staging(Settings(home=pathlib.Path(sys.argv[1]))).new_folder(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(settings.home)], check=False)
    own = Staging(settings)
    other = staging_root(settings) / own.folder.name.replace(own.folder.name.partition("~")[0], "elsewhere")
    other.mkdir()
    assert len(list(staging_root(settings).iterdir())) == 3
    sweep(settings)
    assert set(staging_root(settings).iterdir()) == {own.folder, other}
    os.utime(other, (0, 0))
    sweep(settings)
    assert list(staging_root(settings).iterdir()) == [own.folder]
    own.close()


def test_a_file_goes_to_the_store_and_back_whatever_its_size(settings: Settings, tmp_path: Path) -> None:
    from noetl_dagster.storage.tiers.objects import WHOLE

    settings = settings.model_copy(update={"minio_bucket": "noetl-staging-test"})
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(gzip.compress(b"x") + os.urandom(WHOLE + 5))
    uri = "s3://noetl-staging-test/large"
    from noetl_dagster.process.event_loop import run_sync
    from noetl_dagster.storage.store import ResultStore

    async def ready() -> None:
        async with ResultStore(settings, None) as store:
            await store.ready(StoreTier.MINIO)

    run_sync(ready())
    digest = locations.copy_from_file(settings, source, uri)
    locations.copy_to_file(settings, uri, back, sha256=digest)
    assert back.read_bytes() == source.read_bytes()
    with pytest.raises(IntegrityError, match="large were changed or damaged"):
        locations.copy_to_file(settings, uri, back, sha256="0" * 64)
    locations.remove_objects(settings, [uri])
