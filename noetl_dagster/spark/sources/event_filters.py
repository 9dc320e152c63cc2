"""Spark's filters as conditions of PostgreSQL, their values bound."""

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

from noetl_dagster.spark.sources.event_queries import COLUMNS

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
class Condition:
    """``text`` with ``{}`` where a placeholder comes, and the value bound there, if there is one."""

    text: str
    values: tuple[Any, ...] = ()


def condition_of(given: Filter) -> Condition | None:
    """A filter as a condition; None when Spark has to decide it.

    Text is compared for order by Spark: PostgreSQL's collation may be another.
    """
    path: tuple[str, ...] = getattr(given, "attribute", ())
    if len(path) != 1 or path[0] not in COLUMNS or path[0] in _JSON:
        return None
    column = COLUMNS[path[0]]
    if isinstance(given, IsNull):
        return Condition(f"{column.sql} IS NULL")
    if isinstance(given, IsNotNull):
        return Condition(f"{column.sql} IS NOT NULL")
    if isinstance(given, In):
        return Condition(f"{column.sql} = ANY({{}}::{column.sql_type}[])", (list(given.value),))
    operator = _OPERATORS.get(type(given))
    if operator is None or (column.sql_type == "text" and operator != "="):
        return None
    return Condition(f"{column.sql} {operator} {{}}::{column.sql_type}", (given.value,))  # type: ignore[attr-defined]


def where(
    conditions: Sequence[Condition], bounds: tuple[_Key | None, _Key | None], horizon: str
) -> tuple[str, list[Any]]:
    """The condition of one slice and its values in order.

    Args:
        bounds: keys from which and up to which, without it, events are read; None is the log's own end.
        horizon: the transaction below which they are read.
    """
    texts, values = ["event.xact_id < $1::text::xid8"], [horizon]
    for condition in [*conditions, *_key_conditions(bounds)]:
        places = [f"${len(values) + number}" for number in range(1, len(condition.values) + 1)]
        texts.append(condition.text.format(*places))
        values += condition.values
    return " AND ".join(texts), values


def _key_conditions(bounds: tuple[_Key | None, _Key | None]) -> list[Condition]:
    """The comparison of the execution alone lets PostgreSQL leave out the log's other partitions."""
    found = []
    for key, operator in zip(bounds, (">=", "<"), strict=True):
        if key is not None:
            outer = ">=" if operator == ">=" else "<="
            found.append(Condition(f"execution_id {outer} {{}}::bigint", (key.execution_id,)))
            row = f"(execution_id, event_id) {operator} ({{}}::bigint, {{}}::bigint)"
            found.append(Condition(row, (key.execution_id, key.event_id)))
    return found
