"""Every statement of the ``noetl_events`` data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the source. ``sql`` is its expression over ``noetl.event``, ``sql_type`` what values
    that are compared with it are bound as."""

    spark_type: str
    sql: str
    sql_type: str


def _plain(name: str, spark_type: str, sql_type: str) -> tuple[str, Column]:
    return name, Column(spark_type, f"event.{name}", sql_type)


def _json(name: str) -> tuple[str, Column]:
    return name, Column("STRING", f"event.{name}::text", "text")


COLUMNS: dict[str, Column] = dict(
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
        ("xact_id", Column("BIGINT", "event.xact_id::text::bigint", "bigint")),
    )
)
"""Columns of ``noetl.event`` in the order of the source's schema. JSON comes as text."""

# Transactions below it have all ended: what is read below it is the same whenever it is read.
HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"

# Percent of the log's pages that hold about so many events; all of them before the first ANALYZE.
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
    """The events of a slice in the order of the primary key."""
    listed = ", ".join(f"{COLUMNS[name].sql} AS {name}" for name in columns)
    return f"SELECT {listed} FROM noetl.event WHERE {condition} ORDER BY execution_id, event_id"
