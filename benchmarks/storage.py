"""The result store beside what it is built on: plain obstore, a plain file copy, plain small puts.

Every number is the ratio of two measurements of the same run on the same bytes, and the goal it is held
against. Run: ``python benchmarks/storage.py [--large 500] [--rounds 5]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import obstore
import psutil

from noetl_dagster import embedded
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.refs import ResultRef
from noetl_dagster.storage.store import NewResult, ResultStore
from noetl_dagster.storage.tiers.objects import PART, PARTS_IN_FLIGHT, minio_store

MB = 1024 * 1024
Action = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    measured: str
    goal: str
    met: bool


async def race(ours: Action, plain: Action, rounds: int) -> tuple[float, float]:
    """Median seconds of two actions that take turns, so that both meet the same machine."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            await (ours, plain)[which]()
            times[which].append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def compared(what: str, seconds: tuple[float, float], megabytes: int, goal: float = 0.9) -> Line:
    ours, plain = seconds
    measured = f"{plain / ours:.2f} of plain ({megabytes / ours:,.0f} MB/s, plain {megabytes / plain:,.0f})"
    return Line(what, measured, f">= {goal}", plain / ours >= goal)


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Megabytes this process grew to above what it had before, sampled every 5 ms."""
    process, stop = psutil.Process(), threading.Event()
    idle = process.memory_info().rss
    peak = idle

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield lambda: (peak - idle) / MB
    stop.set()
    watcher.join()


async def file_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, 4 * MB):
            yield chunk


async def in_memory(store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> list[Line]:
    """Values that are whole in memory: put and get."""
    data = os.urandom(megabytes * MB)
    bucket = minio_store(settings)
    folder = Path(tempfile.mkdtemp(dir=settings.pvc_mount_path))
    refs: dict[StoreTier, ResultRef] = {}

    async def put(tier: StoreTier) -> None:
        refs[tier] = await store.put(data, execution_id=1, step="bench", name="blob", tier=tier)

    async def plain_put() -> None:
        await obstore.put_async(bucket, "plain", data, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT)

    async def plain_get() -> bytes:
        return bytes(await (await obstore.get_async(bucket, "plain")).bytes_async())

    def write_synced() -> None:
        with (folder / "plain").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    read = (folder / "plain").read_bytes
    await put(StoreTier.MINIO)  # makes the bucket
    lines = [
        compared(
            f"minio put {megabytes} MB",
            await race(lambda: put(StoreTier.MINIO), plain_put, rounds),
            megabytes,
        ),
        compared(
            f"minio get {megabytes} MB, verified",
            await race(lambda: store.get(refs[StoreTier.MINIO]), plain_get, rounds),
            megabytes,
        ),
        compared(
            f"pvc write {megabytes} MB (plain: write and fsync)",
            await race(lambda: put(StoreTier.PVC), lambda: asyncio.to_thread(write_synced), rounds),
            megabytes,
        ),
        compared(
            f"pvc read {megabytes} MB, verified",
            await race(lambda: store.get(refs[StoreTier.PVC]), lambda: asyncio.to_thread(read), rounds),
            megabytes,
        ),
    ]
    await obstore.delete_async(bucket, "plain")
    shutil.rmtree(folder)
    return lines


async def streamed(store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> list[Line]:
    """Values that are never whole in memory: a file goes up and comes back."""
    bucket = minio_store(settings)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(dir=settings.pvc_mount_path) as name:
        folder = Path(name)
        source = folder / "source"
        with source.open("wb") as file:
            for _ in range(megabytes):
                file.write(os.urandom(MB))
        refs: dict[StoreTier, ResultRef] = {}

        async def put(tier: StoreTier) -> None:
            if tier in refs:
                await store.delete(refs[tier])
            refs[tier] = await store.put_stream(
                file_chunks(source), execution_id=1, step="bench", name="stream", tier=tier
            )

        async def plain_put() -> None:
            chunks = file_chunks(source)
            await obstore.put_async(bucket, "plain", chunks, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT)

        async def get(tier: StoreTier) -> None:
            async for _ in store.stream(refs[tier]):
                pass

        async def plain_get() -> None:
            async for _ in (await obstore.get_async(bucket, "plain")).stream(min_chunk_size=MB):
                pass

        def copy() -> None:
            shutil.copyfile(source, folder / "copy")
            with (folder / "copy").open("rb+") as file:
                os.fsync(file.fileno())

        async def plain_read() -> None:
            async for _ in file_chunks(folder / "copy"):
                pass

        for tier, plain, what in (
            (StoreTier.MINIO, plain_put, "minio put"),
            (StoreTier.PVC, lambda: asyncio.to_thread(copy), "pvc write"),
        ):
            await put(tier)
            with peak_memory() as peak:
                await put(tier)
            lines.append(Line(f"{what} {megabytes} MB, memory", f"{peak():.0f} MB", "< 64 MB", peak() < 64))
            seconds = await race(lambda tier=tier: put(tier), plain, rounds)  # type: ignore[misc]
            lines.append(compared(f"{what} {megabytes} MB streamed", seconds, megabytes))
        for tier, plain, what in (
            (StoreTier.MINIO, plain_get, "minio get"),
            (StoreTier.PVC, plain_read, "pvc read"),
        ):
            with peak_memory() as peak:
                await get(tier)
            lines.append(Line(f"{what} {megabytes} MB, memory", f"{peak():.0f} MB", "< 64 MB", peak() < 64))
            seconds = await race(lambda tier=tier: get(tier), plain, rounds)  # type: ignore[misc]
            lines.append(compared(f"{what} {megabytes} MB streamed, verified", seconds, megabytes))
        for ref in refs.values():
            await store.delete(ref)
        await obstore.delete_async(bucket, "plain")
    return lines


async def small(store: ResultStore, count: int) -> list[Line]:
    """Results of a few hundred bytes, each an object and a row."""
    items = [NewResult({"id": n, "text": "x" * 200}, 1, "bench", f"small-{n}") for n in range(count)]
    lines = []
    for tier in (StoreTier.MINIO, StoreTier.KV, StoreTier.EVENTLOG):
        chosen = [NewResult(item.value, item.execution_id, item.step, item.name, tier=tier) for item in items]
        begin = time.perf_counter()
        for start in range(0, count, 500):
            await store.put_many(chosen[start : start + 500])
        rate = count / (time.perf_counter() - begin)
        lines.append(Line(f"small results, {tier.value}", f"{rate:,.0f} a second", ">= 1,000", rate >= 1000))
    return lines


async def measure(settings: Settings, pool: asyncpg.Pool, large: int, rounds: int) -> list[Line]:
    async with ResultStore(settings, pool) as store:
        lines = await small(store, 3000)
        lines += await in_memory(store, settings, 15, rounds * 3)
        lines += await streamed(store, settings, large, rounds)
        await pool.execute("DELETE FROM noetl.result_ref WHERE source_step = 'bench'")
    return lines


async def run(settings: Settings, large: int, rounds: int) -> list[Line]:
    assert settings.db_url is not None
    await apply_schema(settings.db_url)
    pool = await open_pool(settings.db_url, size=4)
    try:
        return await measure(settings, pool, large, rounds)
    finally:
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=500, help="megabytes of the streamed value")
    parser.add_argument("--rounds", type=int, default=5, help="times each large action is measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as home:
        settings = embedded.ensure(Settings(home=Path(home)))
        try:
            lines = asyncio.run(run(settings, given.large, given.rounds))
        finally:
            embedded.down(settings)
    width = max(len(line.what) for line in lines)
    for line in lines:
        print(f"{line.what:<{width}}  {'ok ' if line.met else 'MISS'}  {line.measured}   (goal {line.goal})")


if __name__ == "__main__":
    main()
