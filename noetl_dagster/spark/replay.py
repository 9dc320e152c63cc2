"""The projection of every execution rebuilt on Spark: executors replay the log, one transaction publishes it.

Each task reads whole executions and folds their events with the same code as the projection worker
(:class:`~noetl_dagster.events.projection_row.ProjectedExecution`). The rows go to a table beside the projection:
readers see the old one until the new one is complete, and a replay that is killed has changed nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pyarrow as pa

from noetl_dagster.errors import ServiceError
from noetl_dagster.events import projection_queries as queries
from noetl_dagster.events.projection_row import CHANGES, Done, ProjectedExecution
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings
from noetl_dagster.spark import progress, replay_queries
from noetl_dagster.spark.sessions import is_classic, own_session, release
from noetl_dagster.spark.sources.events import FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_A_STATEMENT = 500
_SUCCESSES = frozenset({EventType.COMMAND_COMPLETED, EventType.LOOP_SHARD_DONE})
_FAILURES = frozenset({EventType.COMMAND_FAILED, EventType.LOOP_SHARD_FAILED})

_READ = (
    "execution_id BIGINT, event_id BIGINT, event_type STRING, catalog_id BIGINT, parent_execution_id BIGINT, "
    "node_name STRING, status STRING, context STRING, result STRING, meta STRING, error STRING, "
    "created_at TIMESTAMP, xact_id BIGINT"
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Executions in the new projection, and events of the log that it is made of."""

    executions: int
    events: int


async def replay_all(
    pool: asyncpg.Pool,
    spark: SparkSession,
    settings: Settings,
    tell: Callable[[str], None] = lambda message: None,
) -> Replayed:
    """Rebuilds ``noetl.execution`` from the whole log; projection workers go on where it ends.

    Args:
        pool: of the event log, of two connections at least.
        tell: is told how far it is, from any thread.
    """
    if settings.db_url is None:
        raise ServiceError("replay: there is no event log; set NOETL_DB_URL")
    await pool.execute(queries.MAKE_CHECKPOINTS)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(queries.LOCK_CHECKPOINTS)  # waits for the workers of all shards
        await connection.execute(queries.RESET_CHECKPOINTS)
        horizon = await connection.fetchval(replay_queries.HORIZON)
        # executors must see it, so it is made outside of the transaction; a killed replay has left one
        await pool.execute(replay_queries.MAKE_STAGING)
        events = await connection.fetchval(queries.COUNT, "0", horizon)
        tell(f"replaying {events} events on Spark")
        group = f"noetl-replay-{uuid.uuid4().hex}"
        async with progress.reporting(spark, group, tell):
            await asyncio.to_thread(_fold, spark, settings, int(horizon), group, tell)
        await connection.execute(queries.FORGET)
        executions = await connection.fetchval(replay_queries.PUBLISH)
        await connection.execute(queries.MOVE_CHECKPOINTS, [*range(queries.SHARDS)], horizon, events)
    await pool.execute(replay_queries.DROP_STAGING)
    return Replayed(executions, events)


def _fold(
    spark: SparkSession, settings: Settings, horizon: int, group: str, tell: Callable[[str], None]
) -> None:
    """Fills the staging table; blocks until Spark is done."""
    assert settings.db_url is not None
    session = own_session(spark, settings, group, "replay")
    try:
        if not is_classic(session):
            progress.tell_connected(session, tell)
        write = partial(fold_into_staging, settings.db_url)
        events_below(session, horizon).mapInArrow(write, "executions BIGINT").collect()
    finally:
        release(group)


def events_below(spark: SparkSession, horizon: int) -> DataFrame:
    """The events that the projection takes, of transactions below the horizon; executions are not divided."""
    # executions differ in size
    tasks = 4 * spark.sparkContext.defaultParallelism if is_classic(spark) else 32
    log = spark.read.format(FORMAT).schema(_READ)
    events = log.option("whole_executions", True).option("tasks", tasks).load()
    kinds = [kind.value for kind in (*CHANGES, *_SUCCESSES, *_FAILURES)]
    return events.where(events["event_type"].isin(kinds) & (events["xact_id"] < horizon))


def fold_into_staging(db_url: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on executors: writes the rows of a slice of the log, gives their number."""
    events = (event for batch in batches for event in batch.to_pylist())
    count = asyncio.run(_write(db_url, folded(events)))
    yield pa.RecordBatch.from_pydict({"executions": pa.array([count], pa.int64())})


def folded(events: Iterable[dict[str, Any]]) -> Iterator[ProjectedExecution]:
    """Executions from their events, which come together for each."""
    for execution_id, own in groupby(events, key=itemgetter("execution_id")):
        done: Counter[tuple[str, int]] = Counter()
        changes = []
        for event in own:
            event["meta"] = orjson.loads(event["meta"])
            done[event["node_name"], int(event["meta"].get("visit") or 1)] += _done_by(event)
            if event["event_type"] in _SUCCESSES:
                continue
            if event["event_type"] not in _FAILURES or _counts_as_failed(event["meta"]):
                changes.append(_parts(event))
        changes.sort(key=itemgetter("xact_id", "event_id"))
        execution = ProjectedExecution(execution_id)
        counts: Done = dict(done)
        execution.apply(changes, counts)
        if execution.created_at is not None:
            yield execution


def _done_by(event: dict[str, Any]) -> int:
    """As :func:`noetl_dagster.events.queries.done_by`."""
    kind, meta = event["event_type"], event["meta"]
    if kind == EventType.LOOP_SHARD_DONE:
        return int("loop_id" in meta)
    if "loop_id" not in meta or "shard_id" in meta:
        return 0
    if kind == EventType.COMMAND_COMPLETED:
        return int("follows" not in meta)
    return -int(kind == EventType.COMMAND_FAILED and "follows" in meta)


def _counts_as_failed(meta: dict[str, Any]) -> bool:
    """An iteration that will not be tried again."""
    return "loop_id" in meta and meta.get("final") in (None, True, "true")


def _parts(event: dict[str, Any]) -> dict[str, Any]:
    """What the projection looks at, as its own query gives it."""
    context = orjson.loads(event.pop("context") or "{}") or {}
    result = orjson.loads(event.pop("result") or "{}") or {}
    opening = event["event_type"] == EventType.PLAYBOOK_INITIALIZED
    return event | {
        "workload": context.get("workload") if opening else None,
        "collection_ref": context.get("collection_ref"),
        "result_uri": (result.get("reference") or {}).get("physical_uri"),
        "result_status": result.get("status"),
    }


async def _write(db_url: str, executions: Iterator[ProjectedExecution]) -> int:
    connection = await asyncpg.connect(db_url)
    count = 0
    rows: list[ProjectedExecution] = []
    try:
        for execution in executions:
            rows.append(execution)
            count += 1
            if len(rows) == ROWS_A_STATEMENT:
                await _put(connection, rows)
                rows = []
        await _put(connection, rows)
    finally:
        await connection.close()
    return count


async def _put(connection: asyncpg.Connection, rows: list[ProjectedExecution]) -> None:
    """A task may run twice, so what is there already stays."""
    text = orjson.dumps(rows).replace(b"\\u0000", b"\\ufffd").decode()  # jsonb holds no NUL
    await connection.execute(replay_queries.PUT_STAGED, text)
