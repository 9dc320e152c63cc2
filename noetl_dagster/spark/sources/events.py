"""The event log as a Spark data source, ``noetl_events``: parallel slices of the log as Arrow batches.

    spark.read.format("noetl_events").load().where("event_type = 'command.failed'").groupBy("node_name").count()

A slice is a range of the primary key (execution, event), so executors read in parallel by index. All of them read
the events that were committed when the query was planned. PostgreSQL evaluates comparisons with fixed values. A
schema of some columns, ``.schema("execution_id BIGINT, event_type STRING")``, reads only these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import asyncpg
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import connect
from noetl_dagster.settings import Settings

FORMAT = "noetl_events"
ROWS_A_BATCH = 8192
SAMPLE = 20_000  # approximate number of events whose keys determine the beginnings of slices

COLUMNS = {
    "execution_id": "BIGINT",
    "event_id": "BIGINT",
    "event_type": "STRING",
    "catalog_id": "BIGINT",
    "parent_event_id": "BIGINT",
    "parent_execution_id": "BIGINT",
    "node_name": "STRING",
    "node_type": "STRING",
    "status": "STRING",
    "duration": "DOUBLE",
    "context": "STRING",
    "result": "STRING",
    "meta": "STRING",
    "error": "STRING",
    "current_index": "INT",
    "current_item": "STRING",
    "worker_id": "STRING",
    "created_at": "TIMESTAMP",
    "xact_id": "BIGINT",
}
"""Columns of ``noetl.event`` and their types in Spark, in the order of the source's schema. JSON comes as text."""

_JSON = frozenset({"context", "result", "meta", "current_item"})
_SQL_TYPES = {
    "BIGINT": "bigint",
    "STRING": "text",
    "DOUBLE": "float8",
    "INT": "int",
    "TIMESTAMP": "timestamptz",
}
_OPERATORS: dict[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}

# All earlier transactions have ended, so reads of their events are repeatable.
HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"

# Percent of the log's pages that contain about $1 events; 100 before the first ANALYZE.
SAMPLE_SHARE = """
SELECT CASE WHEN bool_or(leaf.reltuples < 0) THEN 100.0
            ELSE least(100.0, greatest(0.01, 100.0 * $1 / greatest(sum(leaf.reltuples), 1))) END::float4
FROM pg_partition_tree('noetl.event') part JOIN pg_class leaf ON leaf.oid = part.relid
WHERE part.isleaf
"""

SAMPLED_KEYS = """
SELECT execution_id, event_id FROM noetl.event TABLESAMPLE SYSTEM ($1::float4)
ORDER BY execution_id, event_id
"""

# The events of a slice, in the order of the primary key.
EVENTS = "SELECT {columns} FROM noetl.event WHERE {condition} ORDER BY execution_id, event_id"

SqlCondition = tuple[str, tuple[Any, ...]]
"""A text with ``{}`` for placeholders, and the values bound there."""


@dataclass(frozen=True, slots=True)
class Key:
    """The beginning of a slice: an event, or a whole execution if ``event_id`` is 0."""

    execution_id: int
    event_id: int = 0


Bounds = tuple[Key | None, Key | None]
"""Of a slice: its first key, and the key after its last one; None is the log's own end."""


class NoetlEvents(DataSource):
    """The data source ``noetl_events``.

    Options: ``tasks``, the approximate number of slices (8); ``whole_executions``: with ``true`` no execution is
    divided between slices, and its events are read together in the order of their ids.
    """

    settings: ClassVar[Settings]

    @classmethod
    def name(cls) -> str:
        """Returns the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Returns the columns and their types, for readers that name none."""
        return ", ".join(f"{name} {spark_type}" for name, spark_type in COLUMNS.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a reader with the options."""
        if self.settings.db_url is None:
            raise ServiceError(f"{FORMAT}: there is no event log; set NOETL_DB_URL")
        if unknown := set(schema.names) - COLUMNS.keys():  # names are a part of the statement
            raise ServiceError(f"{FORMAT}: the log has no columns {', '.join(sorted(unknown))}")
        return _EventsReader(
            self.settings.db_url,
            schema,
            tasks=max(int(self.options.get("tasks", "8")), 1),
            whole=self.options.get("whole_executions", "false").lower() == "true",
        )


@dataclass(eq=False)
class _EventsReader(DataSourceReader):
    db_url: str
    spark_schema: StructType
    tasks: int
    whole: bool
    conditions: list[SqlCondition] = field(default_factory=list)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802, Spark's own name
        """Accepts the filters that PostgreSQL can evaluate; yields the rest for Spark."""
        for pushed in filters:
            condition = condition_of(pushed)
            if condition is None:
                yield pushed
            else:
                self.conditions.append(condition)

    def partitions(self) -> list[InputPartition]:
        return asyncio.run(self._planned())

    async def _planned(self) -> list[InputPartition]:
        connection = await connect(self.db_url)
        try:
            horizon = await connection.fetchval(HORIZON)
            share = await connection.fetchval(SAMPLE_SHARE, SAMPLE)
            keys = [Key(*row) for row in await connection.fetch(SAMPLED_KEYS, share)]
        finally:
            await connection.close()
        bounds = [None, *slice_starts(keys, self.tasks, whole=self.whole), None]
        return [InputPartition((pair, horizon)) for pair in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self.spark_schema, timezone="UTC")
        batches = self._batches(*partition.value)

        async def following() -> list[asyncpg.Record] | None:
            return await anext(batches, None)

        with asyncio.Runner() as runner:
            while (rows := runner.run(following())) is not None:
                columns = zip(*(row.values() for row in rows), strict=True)
                arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    async def _batches(self, bounds: Bounds, horizon: str) -> AsyncIterator[list[asyncpg.Record]]:
        condition, values = where(self.conditions, bounds, horizon)
        listed = ", ".join(f"{_sql(name)} AS {name}" for name in self.spark_schema.names)
        connection = await connect(self.db_url)
        try:
            async with connection.transaction(readonly=True):
                cursor = await connection.cursor(EVENTS.format(columns=listed, condition=condition), *values)
                while rows := await cursor.fetch(ROWS_A_BATCH):
                    yield rows
        finally:
            await connection.close()


def slice_starts(keys: list[Key], tasks: int, *, whole: bool) -> list[Key]:
    """Returns the keys at which slices after the first begin, for ``tasks`` slices of about the same size.

    ``keys`` are a sorted sample of the log's. With ``whole``, slices begin with an execution.
    """
    chosen = (keys[len(keys) * number // tasks] for number in range(1, tasks) if keys)
    starts = (Key(key.execution_id) if whole else key for key in chosen)
    first = keys[0].execution_id if keys else 0
    return [key for key in dict.fromkeys(starts) if not whole or key.execution_id > first]


def condition_of(pushed: Filter) -> SqlCondition | None:
    """Returns a filter as a condition; None if Spark has to evaluate it.

    Spark compares the order of texts, since PostgreSQL's collation may differ.
    """
    path: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(path) != 1 or path[0] not in COLUMNS or path[0] in _JSON:
        return None
    column, kind = _sql(path[0]), _SQL_TYPES[COLUMNS[path[0]]]
    if isinstance(pushed, IsNull):
        return f"{column} IS NULL", ()
    if isinstance(pushed, IsNotNull):
        return f"{column} IS NOT NULL", ()
    if isinstance(pushed, In):
        return f"{column} = ANY({{}}::{kind}[])", (list(pushed.value),)
    operator = _OPERATORS.get(type(pushed))
    if operator is None or (kind == "text" and operator != "="):
        return None
    return f"{column} {operator} {{}}::{kind}", (pushed.value,)  # type: ignore[attr-defined]


def where(conditions: Sequence[SqlCondition], bounds: Bounds, horizon: str) -> tuple[str, list[Any]]:
    """Returns the condition of one slice and its values in order; it has only events before the horizon."""
    all_conditions = list(conditions)
    for key, operator in zip(bounds, (">=", "<"), strict=True):
        if key is not None:
            # the condition on the execution alone lets PostgreSQL skip partitions of the log
            outer = ">=" if operator == ">=" else "<="
            all_conditions.append((f"execution_id {outer} {{}}::bigint", (key.execution_id,)))
            row = f"(execution_id, event_id) {operator} ({{}}::bigint, {{}}::bigint)"
            all_conditions.append((row, (key.execution_id, key.event_id)))
    texts, values = ["event.xact_id < $1::text::xid8"], [horizon]
    for text, bound in all_conditions:
        texts.append(text.format(*(f"${len(values) + number}" for number in range(1, len(bound) + 1))))
        values += bound
    return " AND ".join(texts), values


def _sql(name: str) -> str:
    """Returns the expression of a column over ``noetl.event``."""
    cast = "::text" if name in _JSON else "::text::bigint" if name == "xact_id" else ""
    return f"event.{name}{cast}"
