"""The event log as a Spark data source, ``noetl_events``: parallel slices of the log as Arrow batches.

    spark.read.format("noetl_events").load().where("event_type = 'command.failed'").groupBy("node_name").count()

A slice is a range of the primary key (execution, event), so executors read in parallel by index. All of them read
the events that were committed when the query was planned. PostgreSQL evaluates comparisons with fixed values. A
schema of some columns, ``.schema("execution_id BIGINT, event_type STRING")``, reads only these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import asyncpg
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sources import event_queries as queries
from noetl_dagster.spark.sources.event_queries import SqlCondition, condition_of, where

FORMAT = "noetl_events"
ROWS_A_BATCH = 8192
SAMPLE = 20_000
"""Approximate number of events whose keys determine the beginnings of slices."""


@dataclass(frozen=True, slots=True)
class Key:
    """The beginning of a slice: an event, or a whole execution if ``event_id`` is 0."""

    execution_id: int
    event_id: int = 0


def events_source(settings: Settings) -> type[DataSource]:
    """Returns the data source for these settings, to be registered with a session.

    The class contains the database's address, so it appears in no option and in no plan.
    """

    class NoetlEvents(_Events):
        _settings = settings

    return NoetlEvents


class _Events(DataSource):
    """The data source ``noetl_events``.

    Options: ``tasks``, the approximate number of slices (8); ``whole_executions``: with ``true`` no execution is
    divided between slices, and its events are read together in the order of their ids.
    """

    _settings: ClassVar[Settings]

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return ", ".join(f"{name} {column.spark_type}" for name, column in queries.COLUMNS.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        if self._settings.db_url is None:
            raise ServiceError(f"{FORMAT}: there is no event log; set NOETL_DB_URL")
        return _EventsReader(
            self._settings.db_url,
            schema,
            tasks=int(self.options.get("tasks", "8")),
            whole=self.options.get("whole_executions", "false").lower() == "true",
        )


class _Slice(InputPartition):
    """Events from one key up to, but without, another; None is the log's own end."""

    def __init__(self, start: Key | None, stop: Key | None, horizon: str) -> None:
        super().__init__(None)
        self.start, self.stop, self.horizon = start, stop, horizon


class _EventsReader(DataSourceReader):
    def __init__(self, db_url: str, schema: StructType, *, tasks: int, whole: bool) -> None:
        self._db_url = db_url
        self._schema = schema
        self._tasks = max(tasks, 1)
        self._whole = whole
        self._conditions: list[SqlCondition] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802, Spark's own name
        """Accepts the filters that PostgreSQL can evaluate; yields the rest for Spark."""
        for given in filters:
            condition = condition_of(given)
            if condition is None:
                yield given
            else:
                self._conditions.append(condition)

    def partitions(self) -> list[InputPartition]:
        return asyncio.run(self._planned())

    async def _planned(self) -> list[InputPartition]:
        connection = await asyncpg.connect(self._db_url)
        try:
            horizon = await connection.fetchval(queries.HORIZON)
            share = await connection.fetchval(queries.SAMPLE_SHARE, SAMPLE)
            keys = [Key(*row) for row in await connection.fetch(queries.SAMPLED_KEYS, share)]
        finally:
            await connection.close()
        starts = slice_starts(keys, self._tasks, whole=self._whole)
        bounds = [None, *starts, None]
        return [_Slice(*pair, horizon) for pair in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Slice)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        with asyncio.Runner() as runner:
            batches = self._batches(partition)
            while (rows := runner.run(_next(batches))) is not None:
                columns = zip(*(row.values() for row in rows), strict=True)
                arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    async def _batches(self, part: _Slice) -> AsyncIterator[list[asyncpg.Record]]:
        text, values = where(self._conditions, (part.start, part.stop), part.horizon)
        statement = queries.events(self._schema.names, text)
        connection = await asyncpg.connect(self._db_url)
        try:
            async with connection.transaction(readonly=True):
                cursor = await connection.cursor(statement, *values)
                while rows := await cursor.fetch(ROWS_A_BATCH):
                    yield rows
        finally:
            await connection.close()


def slice_starts(keys: list[Key], tasks: int, *, whole: bool) -> list[Key]:
    """Returns the keys at which slices after the first begin, for ``tasks`` slices of about the same size.

    Args:
        keys: a sample of the log's keys, sorted.
        whole: slices begin with an execution.
    """
    chosen = (keys[len(keys) * number // tasks] for number in range(1, tasks) if keys)
    starts = (Key(key.execution_id) if whole else key for key in chosen)
    first = keys[0].execution_id if keys else 0
    return [key for key in dict.fromkeys(starts) if not whole or key.execution_id > first]


async def _next(batches: AsyncIterator[list[asyncpg.Record]]) -> list[asyncpg.Record] | None:
    return await anext(batches, None)
