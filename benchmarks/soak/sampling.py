"""What is sampled: processes, PostgreSQL, the projection, NATS, and stored results."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import nats.errors
import psutil
from nats.aio.client import Client

from benchmarks.soak.series import Series, Tolerance
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.transport.nats import NatsNames

MEGABYTE = 1024**2
TABLES = ("queue", "execution", "result_ref", "cursor_frame", "runtime", "projection_checkpoint", "execution_shard")

CONNECTIONS = """
SELECT COALESCE(replace(state, ' ', '-'), 'none') AS state, count(*) FROM pg_stat_activity
WHERE datname IS NOT NULL AND pid <> pg_backend_pid() GROUP BY 1
"""
OLDEST = """
SELECT COALESCE(max(extract(epoch FROM now() - xact_start)), 0)::float8 FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
DEAD = """
SELECT relname, n_live_tup AS rows, n_dead_tup AS dead, autovacuum_count AS vacuums, pg_table_size(relid) AS bytes,
    pg_indexes_size(relid) AS index_bytes
FROM pg_stat_user_tables WHERE schemaname = 'noetl' AND relname = ANY($1)
"""
LOG = """
SELECT count(*) AS partitions, sum(pg_table_size(leaf.relid))::float8 AS bytes,
    sum(pg_indexes_size(leaf.relid))::float8 AS index_bytes, sum(stat.n_live_tup)::float8 AS events,
    sum(stat.n_dead_tup)::float8 AS dead
FROM pg_partition_tree('noetl.event') leaf JOIN pg_stat_user_tables stat ON stat.relid = leaf.relid WHERE isleaf
"""
WRITTEN = """
SELECT relname, n_tup_ins AS count FROM pg_stat_user_tables
WHERE schemaname = 'noetl' AND relname LIKE 'event\\_%' AND relname <> 'event_default'
"""
BEHIND = """
SELECT count(*) FROM noetl.event WHERE xact_id >= (SELECT min(xact_id) FROM noetl.projection_checkpoint)
"""
QUEUE = "SELECT status, count(*) FROM noetl.queue GROUP BY 1"
STORED = "SELECT count(*) AS results, COALESCE(sum(bytes_size), 0)::float8 AS bytes FROM noetl.result_ref"
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8"
DATABASES = "SELECT datname, pg_database_size(datname)::float8 AS bytes FROM pg_database WHERE datname = 'dagster'"

_MEMORY = Tolerance(0.1, 16)
_COUNT = Tolerance(0.1, 8)
_EXPECTED: Mapping[str, Tolerance | None] = {
    "this benchmark": None,
    "object_store: memory": None,  # of SeaweedFS, which keeps what it wrote last in memory
    "autovacuums": None,
    "bytes of messages": Tolerance(0.2, 8),
    "memory": _MEMORY,
    "files": _COUNT,
    "threads": _COUNT,
    "processes": Tolerance(0.1, 3),
    "CPU": Tolerance(0.2, 0.2),
    "connections": _COUNT,
    "dead rows": Tolerance(0.2, 20_000),
    "index": Tolerance(0.2, 4),
    "table": Tolerance(0.2, 4),
    "WAL": Tolerance(0.2, 1),
    "lag": Tolerance(0.2, 1),
    "behind": Tolerance(0.2, 5_000),
    "oldest transaction": Tolerance(0.2, 1),
    "queue": Tolerance(0.2, 500),
    "messages": Tolerance(0.2, 500),
    "redelivered": Tolerance(0.2, 50),
    "partitions": Tolerance(0.2, 2),
    "size on disk": Tolerance(0.2, 32),
    "bytes an event": Tolerance(0.1, 20),
}
"""By a word of the name; series without one are shown without a verdict."""


@dataclass(slots=True)
class Recorder:
    """All series of a run."""

    began: float = field(default_factory=time.monotonic)
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, name: str, value: float, unit: str = "") -> None:
        """Adds a sample; the name decides how much the series may grow."""
        if name not in self.series:
            tolerance = next((one for word, one in _EXPECTED.items() if word in name), None)
            self.series[name] = Series(name, unit, tolerance)
        self.series[name].add(self.seconds, value)


class ProcessSampler:
    """Samples processes by role, with their descendants.

    Args:
        roles: returns the processes of each role by their ids; called for every sample.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._used: dict[tuple[int, float], float] = {}
        self._at = time.monotonic()

    def sample(self, roles: Mapping[str, set[int]]) -> None:
        passed, self._at = time.monotonic() - self._at, time.monotonic()
        used: dict[tuple[int, float], float] = {}
        for role, found in _by_role(roles).items():
            sums: dict[str, float] = defaultdict(float)
            for one in found:
                try:
                    _measure(one, sums)
                    key = (one.pid, one.create_time())
                    used[key] = sum(one.cpu_times()[:2])
                    sums["CPU"] += used[key] - self._used.get(key, used[key])
                except psutil.NoSuchProcess:
                    continue
            add = self._recorder.add
            add(f"{role}: processes", sums["processes"])
            add(f"{role}: memory", sums["memory"] / MEGABYTE, "MB")
            add(f"{role}: memory of the largest process", sums["largest"] / MEGABYTE, "MB")
            add(f"{role}: files", sums["files"])
            add(f"{role}: threads", sums["threads"])
            add(f"{role}: CPU", sums["CPU"] / max(passed, 0.001), "cores")
        self._used = used


def _measure(process: psutil.Process, sums: dict[str, float]) -> None:
    """Adds a process: its proportional memory, and its private memory if that is the largest."""
    with process.oneshot():
        memory = process.memory_full_info()
        sums["processes"] += 1
        sums["memory"] += memory.pss
        sums["largest"] = max(sums["largest"], memory.uss)
        sums["files"] += process.num_fds()
        sums["threads"] += process.num_threads()


def _by_role(roles: Mapping[str, set[int]]) -> dict[str, list[psutil.Process]]:
    """Returns the processes of each role with all descendants that have no role of their own."""
    role_of = {pid: role for role, pids in roles.items() for pid in pids}
    found: dict[str, list[psutil.Process]] = {role: [] for role in roles}
    parents = {one.pid: one for one in psutil.process_iter(["ppid"])}
    for one in parents.values():
        at: psutil.Process | None = one
        while at is not None and at.pid not in role_of:
            at = parents.get(at.info["ppid"])
        if at is not None:
            found[role_of[at.pid]].append(one)
    return found


class LogSampler:
    """Samples PostgreSQL: its sessions, the tables of the log, and the projection."""

    def __init__(self, recorder: Recorder, pool: asyncpg.Pool[Any]) -> None:
        self._recorder = recorder
        self._pool = pool
        self._projection = Projection(pool)
        self._wal: tuple[float, float] | None = None

    async def sample(self) -> None:
        await self._sessions()
        await self._tables()
        add, pool = self._recorder.add, self._pool
        add("projection: lag", await self._projection.lag_seconds(), "s")
        add("projection: events behind", await pool.fetchval(BEHIND))
        queued = {row["status"]: row["count"] for row in await pool.fetch(QUEUE)}
        for status in ("queued", "leased"):
            add(f"queue: {status}", queued.get(status, 0))
        stored = await pool.fetchrow(STORED)
        add("store: results", stored["results"])
        add("store: bytes of results", stored["bytes"] / MEGABYTE, "MB")

    async def _sessions(self) -> None:
        add, pool = self._recorder.add, self._pool
        states = {row["state"]: row["count"] for row in await pool.fetch(CONNECTIONS)}
        add("PostgreSQL: connections", sum(states.values()))
        for state in ("active", "idle", "idle-in-transaction"):
            add(f"PostgreSQL: {state} connections", states.get(state, 0))
        add("PostgreSQL: oldest transaction", await pool.fetchval(OLDEST), "s")
        wal, now = await pool.fetchval(WAL), time.monotonic()
        if self._wal is not None:
            before, at = self._wal
            add("PostgreSQL: WAL", (wal - before) / (now - at) / MEGABYTE, "MB/s")
        self._wal = wal, now
        for row in await pool.fetch(DATABASES):
            add(f"database {row['datname']}: size", row["bytes"] / MEGABYTE, "MB")

    async def _tables(self) -> None:
        add = self._recorder.add
        for row in await self._pool.fetch(DEAD, list(TABLES)):
            name = f"noetl.{row['relname']}"
            add(f"{name}: dead rows", row["dead"])
            add(f"{name}: rows", row["rows"])
            add(f"{name}: autovacuums", row["vacuums"])
            add(f"{name}: table", row["bytes"] / MEGABYTE, "MB")
            add(f"{name}: index", row["index_bytes"] / MEGABYTE, "MB")
        log = await self._pool.fetchrow(LOG)
        add("log: partitions", log["partitions"])
        add("log: events", log["events"])
        add("log: dead rows", log["dead"])
        if log["events"]:
            add("log: table bytes an event", log["bytes"] / log["events"], "B")
            add("log: index bytes an event", log["index_bytes"] / log["events"], "B")


class WrittenEvents:
    """Counts the events that were written into the log, also those of partitions that are gone."""

    def __init__(self) -> None:
        self._of_partition: dict[str, int] = {}

    async def count(self, pool: asyncpg.Pool[Any]) -> int:
        for row in await pool.fetch(WRITTEN):
            self._of_partition[row["relname"]] = max(row["count"], self._of_partition.get(row["relname"], 0))
        return sum(self._of_partition.values())


class StreamSampler:
    """Samples the stream of worker events and its consumer."""

    def __init__(self, recorder: Recorder, client: Client, names: NatsNames) -> None:
        self._recorder = recorder
        self._stream = client.jetstream()
        self._names = names

    async def sample(self) -> None:
        add = self._recorder.add
        try:
            stream = await self._stream.stream_info(self._names.event_stream)
            consumer = await self._stream.consumer_info(self._names.event_stream, self._names.ingest_consumer)
        except nats.errors.Error:
            return  # the API makes them at its start
        add("NATS: messages", stream.state.messages)
        add("NATS: bytes of messages", stream.state.bytes / MEGABYTE, "MB")
        add("NATS: consumers", stream.state.consumer_count)
        add("NATS: pending messages", consumer.num_pending or 0)
        add("NATS: unacknowledged messages", consumer.num_ack_pending or 0)
        add("NATS: redelivered", consumer.num_redelivered or 0)


def folder_megabytes(folder: Path) -> float:
    """Returns the size of the files of a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total / MEGABYTE
