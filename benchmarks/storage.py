"""The result store beside what it is built on: plain obstore, a plain file copy, plain small puts.

Every number is the ratio of two measurements of the same run on the same bytes, and the goal it is held
against. Below each read of the object store stands what the plain client reaches when it has to find the
sha256 of the bytes too, in a thread beside it: on two cores, which the server, the client and the digest
share, that is the limit. Run: ``python benchmarks/storage.py [--large 500] [--rounds 5]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import obstore
import psutil

from noetl_dagster import embedded
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.store import NewResult, ResultStore
from noetl_dagster.storage.tiers.base import CHUNK
from noetl_dagster.storage.tiers.objects import PART, PARTS_IN_FLIGHT, minio_store

MB = 1024 * 1024
Action = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; one without a goal is for information."""

    what: str
    measured: str
    goal: str | None = None
    met: bool = True

    def __str__(self) -> str:
        verdict = "    " if self.goal is None else "ok  " if self.met else "MISS"
        return f"{self.what:<50}  {verdict}  {self.measured}" + (f"   (goal {self.goal})" if self.goal else "")


async def race(*actions: Action, rounds: int, tidy: Callable[[], Awaitable[object]] | None = None) -> list[float]:
    """Median seconds of actions that take turns, so that all meet the same machine.

    Args:
        tidy: removes what an action has left, after each and outside its time.
    """
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds):
        for place in range(len(actions)):
            which = (turn + place) % len(actions)
            begin = time.perf_counter()
            await actions[which]()
            times[which].append(time.perf_counter() - begin)
            if tidy is not None:
                await tidy()
    return [statistics.median(seconds) for seconds in times]


def compared(what: str, seconds: list[float], megabytes: int, goal: float | None = 0.9) -> Line:
    """The first of the measured seconds beside the last, which is the plain action."""
    ours, plain = seconds[0], seconds[-1]
    measured = f"{plain / ours:.2f} of plain ({megabytes / ours:,.0f} MB/s, plain {megabytes / plain:,.0f})"
    return Line(what, measured) if goal is None else Line(what, measured, f">= {goal}", plain / ours >= goal)


async def digested(chunks: AsyncIterator[bytes], *, keep: bool) -> bytes:
    """The plain client when it has to know the sha256: a thread hashes a chunk while the next one comes."""
    digest, kept = hashlib.sha256(), []
    running: asyncio.Future[None] | None = None
    async for chunk in chunks:
        if running is not None:
            await running
        running = asyncio.ensure_future(asyncio.to_thread(digest.update, chunk))
        if keep:
            kept.append(chunk)
    whole = b"".join(kept)
    if running is not None:
        await running
    return whole


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


class Contest:
    """The store and the plain way write and read the same bytes, in one bucket and on one volume."""

    def __init__(self, store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> None:
        assert settings.pvc_mount_path is not None
        self.store, self.megabytes, self.rounds = store, megabytes, rounds
        self.bucket = minio_store(settings)
        self.folder = Path(tempfile.mkdtemp(dir=settings.pvc_mount_path))
        self.refs: list[ResultRef] = []
        self.keys: list[str] = []

    async def put(self, what: bytes | Path, tier: StoreTier) -> ResultRef:
        where: dict[str, Any] = {"execution_id": 1, "step": "bench", "name": "blob", "tier": tier}
        if isinstance(what, bytes):
            ref = await self.store.put(what, **where)
        else:
            ref = await self.store.put_stream(file_chunks(what), **where)
        self.refs.append(ref)
        return ref

    async def plain_put(self, what: bytes | Path) -> str:
        key = f"plain-{time.monotonic_ns()}"
        source = what if isinstance(what, bytes) else file_chunks(what)
        await obstore.put_async(self.bucket, key, source, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT)
        self.keys.append(key)
        return key

    def durable_copy(self, what: bytes | Path) -> None:
        """What a careful ``cp`` does: a new file, synced, renamed, its folder synced."""
        fresh = self.folder / "fresh"
        if isinstance(what, bytes):
            fresh.write_bytes(what)
        else:
            shutil.copyfile(what, fresh)
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        fresh.rename(self.folder / f"plain-{time.monotonic_ns()}")
        sync_folder(self.folder)

    async def tidy(self) -> None:
        for ref in self.refs:
            await self.store.delete(ref)
        for key in self.keys:
            await obstore.delete_async(self.bucket, key)
        for path in self.folder.glob("plain-*"):
            path.unlink()
        self.refs, self.keys = [], []

    async def writes(self, what: bytes | Path, kind: str) -> list[Line]:
        minio = await race(
            lambda: self.put(what, StoreTier.MINIO),
            lambda: self.plain_put(what),
            rounds=self.rounds,
            tidy=self.tidy,
        )
        pvc = await race(
            lambda: self.put(what, StoreTier.PVC),
            lambda: asyncio.to_thread(self.durable_copy, what),
            rounds=self.rounds,
            tidy=self.tidy,
        )
        return [
            compared(f"minio put {kind}", minio, self.megabytes),
            compared(f"pvc write {kind} (plain: durable copy)", pvc, self.megabytes),
        ]

    async def reads(self, what: bytes | Path, kind: str) -> list[Line]:
        key, whole = await self.plain_put(what), isinstance(what, bytes)
        refs = {tier: await self.put(what, tier) for tier in (StoreTier.MINIO, StoreTier.PVC)}
        copied, away = self.folder / "copied", self.folder / "away"
        copied.write_bytes(what) if isinstance(what, bytes) else shutil.copyfile(what, copied)

        async def ours(tier: StoreTier) -> None:
            if whole:
                await self.store.get(refs[tier])
                return
            async for _ in self.store.stream(refs[tier]):
                pass

        async def plain_get() -> None:
            response = await obstore.get_async(self.bucket, key)
            if whole:
                bytes(await response.bytes_async())
                return
            async for _ in response.stream(min_chunk_size=MB):
                pass

        async def plain_get_digested() -> None:
            response = await obstore.get_async(self.bucket, key)
            await digested(response.stream(min_chunk_size=CHUNK), keep=whole)

        minio = await race(lambda: ours(StoreTier.MINIO), plain_get_digested, plain_get, rounds=self.rounds)
        pvc = await race(
            lambda: ours(StoreTier.PVC),
            lambda: asyncio.to_thread(shutil.copyfile, copied, away),
            rounds=self.rounds,
        )
        await self.tidy()
        return [
            compared(f"minio get {kind}, verified", minio, self.megabytes),
            compared(f"  plain client with a sha256, {kind}", minio[1:], self.megabytes, goal=None),
            compared(f"pvc read {kind}, verified (plain: copy)", pvc, self.megabytes),
        ]


async def in_memory(store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> list[Line]:
    """Values that are whole in memory: put and get."""
    contest = Contest(store, settings, megabytes, rounds)
    data, kind = os.urandom(megabytes * MB), f"{megabytes} MB"
    lines = await contest.writes(data, kind) + await contest.reads(data, kind)
    shutil.rmtree(contest.folder)
    return lines


async def streamed(store: ResultStore, settings: Settings, megabytes: int, rounds: int) -> list[Line]:
    """Values that are never whole in memory: a file goes up and comes back."""
    contest = Contest(store, settings, megabytes, rounds)
    source = contest.folder / "source"
    with source.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(MB))
    lines: list[Line] = []
    for tier in (StoreTier.MINIO, StoreTier.PVC):
        with peak_memory() as peak:
            ref = await contest.put(source, tier)
        lines.append(memory(f"{tier.value} write {megabytes} MB, memory", peak()))
        with peak_memory() as peak:
            async for _ in store.stream(ref):
                pass
        lines.append(memory(f"{tier.value} read {megabytes} MB, memory", peak()))
    await contest.tidy()
    kind = f"{megabytes} MB streamed"
    lines += await contest.writes(source, kind) + await contest.reads(source, kind)
    shutil.rmtree(contest.folder)
    return lines


def memory(what: str, megabytes: float) -> Line:
    return Line(what, f"{megabytes:.0f} MB", "< 64 MB", megabytes < 64)


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
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
