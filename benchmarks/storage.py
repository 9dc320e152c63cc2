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


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


async def in_memory(store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> list[Line]:
    """Values that are whole in memory: put and get."""
    data = os.urandom(megabytes * MB)
    bucket = minio_store(settings)
    folder = Path(tempfile.mkdtemp(dir=settings.pvc_mount_path))
    refs: dict[StoreTier, ResultRef] = {}

    async def put(tier: StoreTier) -> None:
        if tier in refs:
            await store.delete(refs[tier])
        refs[tier] = await store.put(data, execution_id=1, step="bench", name="blob", tier=tier)

    async def plain_put() -> None:
        await obstore.put_async(bucket, "plain", data, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT)

    async def plain_get() -> bytes:
        return bytes(await (await obstore.get_async(bucket, "plain")).bytes_async())

    def durable_copy() -> None:
        """What a careful ``cp`` does: a new file, synced, renamed, its folder synced."""
        fresh = folder / f"plain-{time.monotonic_ns()}"
        with fresh.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        fresh.rename(folder / "plain")
        sync_folder(folder)

    def copy_away() -> None:
        shutil.copyfile(folder / "plain", folder / "copy")

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
            f"pvc write {megabytes} MB (plain: durable copy)",
            await race(lambda: put(StoreTier.PVC), lambda: asyncio.to_thread(durable_copy), rounds),
            megabytes,
        ),
        compared(
            f"pvc read {megabytes} MB, verified (plain: copy)",
            await race(lambda: store.get(refs[StoreTier.PVC]), lambda: asyncio.to_thread(copy_away), rounds),
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

        def durable_copy() -> None:
            fresh = folder / "fresh"
            shutil.copyfile(source, fresh)
            with fresh.open("rb+") as file:
                os.fsync(file.fileno())
            fresh.rename(folder / "copy")
            sync_folder(folder)

        def copy_away() -> None:
            shutil.copyfile(source, folder / "away")

        for tier, plain, what in (
            (StoreTier.MINIO, plain_put, "minio put"),
            (StoreTier.PVC, lambda: asyncio.to_thread(durable_copy), "pvc write"),
        ):
            with peak_memory() as peak:
                await put(tier)
            lines.append(Line(f"{what} {megabytes} MB, memory", f"{peak():.0f} MB", "< 64 MB", peak() < 64))
            seconds = await race(lambda tier=tier: put(tier), plain, rounds)  # type: ignore[misc]
            lines.append(compared(f"{what} {megabytes} MB streamed", seconds, megabytes))
        for tier, plain, what in (
            (StoreTier.MINIO, plain_get, "minio get"),
            (StoreTier.PVC, lambda: asyncio.to_thread(copy_away), "pvc read"),
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


async def small(store: ResultStore, settings: Settings, count: int) -> list[Line]:
    """Results of a few hundred bytes, each an object and a row; beside them, objects alone."""
    bucket, limit, data = minio_store(settings), asyncio.Semaphore(32), b"x" * 230

    async def plain(number: int) -> None:
        async with limit:
            await obstore.put_async(bucket, f"plain/{number}", data, use_multipart=False)

    begin = time.perf_counter()
    await asyncio.gather(*map(plain, range(count)))
    alone = count / (time.perf_counter() - begin)
    lines = []
    for tier in (StoreTier.MINIO, StoreTier.KV, StoreTier.EVENTLOG):
        value = {"id": 1, "text": "x" * 200}
        items = [NewResult(value, 1, "bench", f"small-{number}", tier=tier) for number in range(count)]
        begin = time.perf_counter()
        for start in range(0, count, 500):
            await store.put_many(items[start : start + 500])
        rate = count / (time.perf_counter() - begin)
        beside = f", plain objects {alone:,.0f}" if tier is StoreTier.MINIO else ""
        measured = f"{rate:,.0f} a second{beside}"
        lines.append(Line(f"small results, {tier.value}", measured, ">= 1,000", rate >= 1000))
    return lines


async def measure(settings: Settings, pool: asyncpg.Pool, large: int, rounds: int) -> list[Line]:
    async with ResultStore(settings, pool) as store:
        lines = await streamed(store, settings, large, rounds)  # first, while the process is small
        lines += await in_memory(store, settings, 15, rounds * 3)
        lines += await small(store, settings, 3000)
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
