"""Statements of the ``noetl_events`` data source, and Spark's filters as SQL conditions with bound values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One column of the source.

    Attributes:
        sql: its expression over ``noetl.event``.
        sql_type: type of bound values that are compared with it.
    """

    spark_type: str
    sql: str
    sql_type: str


def _plain(name: str, spark_type: str, sql_type: str) -> tuple[str, EventColumn]:
    return name, EventColumn(spark_type, f"event.{name}", sql_type)


def _json(name: str) -> tuple[str, EventColumn]:
    return name, EventColumn("STRING", f"event.{name}::text", "text")


COLUMNS: dict[str, EventColumn] = dict(
    (
        _plain("execution_id", "BIGINT", "bigint"),
        _plain("event_id", "BIGINT", "bigint"),
        _plain("event_type", "STRING", "text"),
        _plain("catalog_id", "BIGINT", "bigint"),
        _plain("parent_event_id", "BIGINT", "bigint"),
        _plain("parent_execution_id", "BIGINT", "bigint"),
        _plain("node_name", "STRING", "text"),
        _plain("node_type", "STRING", "text"),
        _plain("status", "STRING", "text"),
        _plain("duration", "DOUBLE", "float8"),
        _json("context"),
        _json("result"),
        _json("meta"),
        _plain("error", "STRING", "text"),
        _plain("current_index", "INT", "int"),
        _json("current_item"),
        _plain("worker_id", "STRING", "text"),
        _plain("created_at", "TIMESTAMP", "timestamptz"),
        ("xact_id", EventColumn("BIGINT", "event.xact_id::text::bigint", "bigint")),
    )
)
"""Columns of ``noetl.event`` in the order of the source's schema. JSON comes as text."""

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


def events(columns: Sequence[str], condition: str) -> str:
    """Returns the statement for the events of a slice, in the order of the primary key."""
    listed = ", ".join(f"{COLUMNS[name].sql} AS {name}" for name in columns)
    return f"SELECT {listed} FROM noetl.event WHERE {condition} ORDER BY execution_id, event_id"


_OPERATORS: dict[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_JSON = frozenset({"context", "result", "meta", "current_item"})


class _Key(Protocol):
    @property
    def execution_id(self) -> int: ...

    @property
    def event_id(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SqlCondition:
    """``text`` with ``{}`` for a placeholder, and the value bound there, if any."""

    text: str
    values: tuple[Any, ...] = ()


def condition_of(given: Filter) -> SqlCondition | None:
    """Returns a filter as a condition; None if Spark has to evaluate it.

    Spark compares the order of texts, since PostgreSQL's collation may differ.
    """
    path: tuple[str, ...] = getattr(given, "attribute", ())
    if len(path) != 1 or path[0] not in COLUMNS or path[0] in _JSON:
        return None
    column = COLUMNS[path[0]]
    if isinstance(given, IsNull):
        return SqlCondition(f"{column.sql} IS NULL")
    if isinstance(given, IsNotNull):
        return SqlCondition(f"{column.sql} IS NOT NULL")
    if isinstance(given, In):
        return SqlCondition(f"{column.sql} = ANY({{}}::{column.sql_type}[])", (list(given.value),))
    operator = _OPERATORS.get(type(given))
    if operator is None or (column.sql_type == "text" and operator != "="):
        return None
    return SqlCondition(f"{column.sql} {operator} {{}}::{column.sql_type}", (given.value,))  # type: ignore[attr-defined]


def where(
    conditions: Sequence[SqlCondition], bounds: tuple[_Key | None, _Key | None], horizon: str
) -> tuple[str, list[Any]]:
    """Returns the condition of one slice and its values in order.

    Args:
        bounds: first key, and the key after the last one; None is the log's own end.
        horizon: only events of earlier transactions are read.
    """
    texts, values = ["event.xact_id < $1::text::xid8"], [horizon]
    for condition in [*conditions, *_key_conditions(bounds)]:
        places = [f"${len(values) + number}" for number in range(1, len(condition.values) + 1)]
        texts.append(condition.text.format(*places))
        values += condition.values
    return " AND ".join(texts), values


def _key_conditions(bounds: tuple[_Key | None, _Key | None]) -> list[SqlCondition]:
    """Returns conditions on the key; the one on the execution alone lets PostgreSQL skip partitions of the log."""
    found = []
    for key, operator in zip(bounds, (">=", "<"), strict=True):
        if key is not None:
            outer = ">=" if operator == ">=" else "<="
            found.append(SqlCondition(f"execution_id {outer} {{}}::bigint", (key.execution_id,)))
            row = f"(execution_id, event_id) {operator} ({{}}::bigint, {{}}::bigint)"
            found.append(SqlCondition(row, (key.execution_id, key.event_id)))
    return found
