"""The schema: idempotent, on every partition, and its indexes serve the queries they were made for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from noetl_dagster.events import queries
from noetl_dagster.events.ids import Snowflake, snowflake_floor
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import apply_schema_on, ensure_partitions, partitions
from noetl_dagster.events.types import EventType

from .conftest import MakeEvent

SEEDS_INDEXES = {
    "uidx_event_command_issued_command_id",
    "uidx_event_loop_done_loop_id",
    "uidx_event_loop_fanin_completed_loop_id",
    "idx_event_loop_id_type",
}
TABLES = {
    "event", "execution", "result_ref", "manifest", "manifest_part", "catalog", "credential", "keychain",
    "runtime", "queue", "schedule", "projection_checkpoint", "execution_shard", "checkpoint",
}  # fmt: skip


async def test_applying_the_schema_again_changes_nothing(pool: asyncpg.Pool[Any]) -> None:
    objects = "SELECT relname FROM pg_class WHERE relnamespace = 'noetl'::regnamespace ORDER BY 1"
    before = await pool.fetch(objects)
    async with pool.acquire() as connection:
        await connection.execute("COMMENT ON SCHEMA noetl IS 'as if the files had changed'")
        await apply_schema_on(connection)
    assert await pool.fetch(objects) == before
    assert {row["relname"] for row in before} >= TABLES


@pytest.mark.usefixtures("months_ahead")
async def test_every_partition_has_the_indexes(pool: asyncpg.Pool[Any]) -> None:
    async with pool.acquire() as connection:
        await ensure_partitions(connection, datetime(2031, 5, 1, tzinfo=UTC))
    rows = await pool.fetch(
        """
        SELECT child.relname AS partition, parent_index.relname AS index
        FROM pg_inherits part
        JOIN pg_class child ON child.oid = part.inhrelid
        JOIN pg_index own ON own.indrelid = child.oid
        JOIN pg_inherits of_index ON of_index.inhrelid = own.indexrelid
        JOIN pg_class parent_index ON parent_index.oid = of_index.inhparent
        WHERE part.inhparent = 'noetl.event'::regclass
        """
    )
    indexes: dict[str, set[str]] = {}
    for row in rows:
        indexes.setdefault(row["partition"], set()).add(row["index"])
    assert {"event_default", "event_y2031m05", "event_y2031m08"} <= set(indexes)
    assert all(found >= SEEDS_INDEXES for found in indexes.values())


async def test_the_log_refuses_results_of_another_shape(log: EventLog, event: MakeEvent) -> None:
    shapes: list[Any] = [{}, {"status": "ok", "rows": [1]}, [1], "ok"]
    for result in shapes:
        with pytest.raises(asyncpg.CheckViolationError):
            await log.append([event(1, EventType.COMMAND_COMPLETED, result=result)])


@pytest.mark.usefixtures("months_ahead")
async def test_loop_queries_use_the_loop_index_of_one_partition(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    """In a log of several months, each with loops of its own."""
    now = datetime.now(UTC)
    async with pool.acquire() as connection:
        await ensure_partitions(connection, now)
    later = [snowflake_floor(now + timedelta(days=days)) for days in (35, 70)]
    execution_id = ids.next()
    for one in (execution_id, *later):
        await log.append(
            [
                event(
                    one,
                    EventType.LOOP_SHARD_DONE if index % 5 else EventType.COMMAND_COMPLETED,
                    node_name="fetch",
                    meta={"loop_id": str(index % 40), "command_id": f"c{index}", "attempt": 1},
                    result={"status": "ok"},
                    current_index=index,
                )
                for index in range(4_000)
            ]
        )
    await pool.execute("ANALYZE noetl.event")
    indexes = await pool.fetch(
        """
        SELECT child.relname FROM pg_inherits
        JOIN pg_class child ON child.oid = inhrelid
        WHERE inhparent = 'noetl.idx_event_loop_id_type'::regclass
        """
    )
    place = "SELECT tableoid::regclass::text FROM noetl.event WHERE execution_id = $1 LIMIT 1"
    own = await pool.fetchval(place, execution_id)
    for query, more in (
        (queries.LOOP_ATTEMPTS, (["7", "8"], 0, 500, True)),  # of a resumed loop
        (queries.LOOP_ENDS, (["7", "8"], 0, 500)),
    ):
        plan = await pool.fetch(f"EXPLAIN {query}", execution_id, *more)
        text = "\n".join(row[0] for row in plan)
        assert any(row["relname"] in text for row in indexes), text
        assert "Seq Scan" not in text
        touched = [name for name in await partitions(pool) if f" on {name}" in text]
        assert [f"noetl.{name}" for name in touched] == [own]


async def test_the_gate_of_an_execution_is_one_look_into_an_index(
    pool: asyncpg.Pool[Any], log: EventLog, event: MakeEvent, ids: Snowflake
) -> None:
    """``noetl.is_open`` is asked with every command: whether the execution is cancelled costs no scan."""
    execution_id = ids.next()
    await log.append(
        [event(execution_id, EventType.COMMAND_COMPLETED, meta={"command_id": str(n)}) for n in range(4_000)]
    )
    await pool.execute("ANALYZE noetl.event")
    plan = await pool.fetch(
        "EXPLAIN SELECT FROM noetl.event WHERE execution_id = $1 AND event_type = 'execution.cancelled'",
        execution_id,
    )
    text = "\n".join(row[0] for row in plan)
    assert "Index" in text, text
    assert "Seq Scan" not in text
    assert text.count(" on event_") == 1, text
