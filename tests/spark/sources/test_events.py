"""The event log on Spark: parallel slices, and filters in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, StringContains

from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import own_session
from noetl_dagster.spark.sources.events import FORMAT, Key, condition_of, slice_starts, where

pytestmark = pytest.mark.spark

ITEMS = 30
EXECUTIONS = 12


def story(ids: Snowflake) -> Iterator[Event]:
    """One execution with a loop, of which the last item fails."""
    execution = ids.next()

    def event(kind: EventType, **fields: object) -> Event:
        return Event(execution, ids.next(), kind, **fields)  # type: ignore[arg-type]

    loop = {"loop_id": "L1", "visit": 1, "epoch": 1}
    workload = {"workload": {"n": 1, "text": "a\x00b"}}
    yield event(EventType.PLAYBOOK_INITIALIZED, node_name="p", meta={"epoch": 1}, context=workload)
    yield event(EventType.STEP_ENTER, node_name="work", meta={"visit": 1, "epoch": 1, "turn": 1})
    size = {"collection_size": ITEMS, "mode": "parallel"}
    yield event(EventType.LOOP_STARTED, node_name="work", meta=loop | size, context={"collection_ref": "s3://b/c"})
    for item in range(ITEMS):
        failed = item == ITEMS - 1
        kind = EventType.COMMAND_FAILED if failed else EventType.COMMAND_COMPLETED
        yield event(kind, node_name="work", meta=loop | {"command_id": f"c{item}"}, current_index=item)
    yield event(EventType.LOOP_DONE, node_name="work", meta=loop)
    yield event(EventType.STEP_EXIT, node_name="work", status="FAILED", error="one item failed", meta=loop)
    yield event(EventType.PLAYBOOK_FAILED, node_name="p", error="one item failed", meta={"epoch": 1})


@pytest.fixture
async def log(pool: asyncpg.Pool) -> list[Event]:
    """Executions whose events are written in turns, as those of a busy system are."""
    ids = Snowflake(1)
    stories = [list(story(ids)) for _ in range(EXECUTIONS)]
    events = [event for turn in zip(*stories, strict=True) for event in turn]
    writer = EventLog(pool, ids)
    for start in range(0, len(events), 50):
        await writer.append(events[start : start + 50])
    return events


@pytest.fixture
def session(spark: SparkSession, settings: Settings) -> SparkSession:
    """A session whose sources lead to the test's own database."""
    return own_session(spark, settings, "events", "events")


async def test_slices_and_filters_give_every_event_once(session: SparkSession, log: list[Event]) -> None:
    frame = session.read.format(FORMAT).option("tasks", 6).load()
    assert frame.rdd.getNumPartitions() == 6
    read = frame.select("execution_id", "event_id").collect()
    assert {tuple(row) for row in read} == {(event.execution_id, event.event_id) for event in log}
    assert len(read) == len(log)
    failed = frame.where(
        (F.col("event_type") == "command.failed")
        & (F.col("created_at") > F.lit(datetime.now(UTC) - timedelta(hours=1)))
        & F.col("execution_id").isin(log[0].execution_id, log[1].execution_id)
        & (F.get_json_object("meta", "$.loop_id") == "L1")
    )
    assert sorted(row.execution_id for row in failed.collect()) == [log[0].execution_id, log[1].execution_id]
    few = session.read.format(FORMAT).schema("node_name STRING, current_index INT").load()
    rows = few.where("current_index >= 28").groupBy("node_name").count().collect()
    assert [tuple(row) for row in rows] == [("work", 2 * EXECUTIONS)]


def test_values_are_bound_and_what_postgres_cannot_decide_is_left_to_spark() -> None:
    taken = [
        EqualTo(("node_name",), "a'b"),
        In(("event_id",), (1, 2)),
        IsNotNull(("error",)),
    ]
    conditions = [condition for given in taken if (condition := condition_of(given)) is not None]
    text, values = where(conditions, (Key(5, 7), None), "99")
    assert "event.node_name = $2::text" in text
    assert "event.event_id = ANY($3::bigint[])" in text
    assert "(execution_id, event_id) >= ($5::bigint, $6::bigint)" in text
    assert values == ["99", "a'b", [1, 2], 5, 5, 7]
    assert condition_of(GreaterThan(("node_name",), "m")) is None
    assert condition_of(EqualTo(("meta",), "{}")) is None
    assert condition_of(StringContains(("error",), "x")) is None


def test_only_columns_of_the_log_are_read(session: SparkSession) -> None:
    some = session.read.format(FORMAT).schema("event_id BIGINT, `1 AS x` BIGINT")
    with pytest.raises(PySparkException, match="the log has no columns 1 AS x"):
        some.load().collect()


def test_slices_begin_where_they_may() -> None:
    keys = [Key(1, event) for event in range(8)] + [Key(2, 9), Key(3, 9)]
    assert slice_starts(keys, 5, whole=False) == [Key(1, 2), Key(1, 4), Key(1, 6), Key(2, 9)]
    assert slice_starts(keys, 5, whole=True) == [Key(2)]
    assert slice_starts([], 5, whole=False) == []
