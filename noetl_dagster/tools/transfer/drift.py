"""Columns of a source that its target has not: refused, left out, or added with a type that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.transfer.chunks import Chunk
from noetl_dagster.tools.transfer.options import OnDrift


class Drift:
    """What a transfer makes of new columns.

    Attributes:
        added, ignored: their names, in the order in which they came.
    """

    def __init__(self, told: OnDrift, target: str, columns: Iterable[str]) -> None:
        self._told, self._target = told, target
        self.columns = list(columns)
        self.added: dict[str, str] = {}
        self.ignored: list[str] = []

    def sort(self, columns: Sequence[str], type_of: Callable[[str], str]) -> tuple[list[str], dict[str, str]]:
        """The columns to write, and those of them that the target does not have yet, with their types.

        Raises:
            ToolError: the target lacks columns, and was not told what to do then.
        """
        new = [name for name in columns if name not in self.columns]
        if new and self._told is OnDrift.ERROR:
            raise ToolError(
                f"{self._target} has no column {', '.join(map(str, new))}; its columns: "
                f"{', '.join(self.columns)}. Write on_drift: add or ignore, or name the columns to read",
                kind="schema",
                code="42703",
            )
        if self._told is OnDrift.IGNORE:
            self.ignored += [name for name in new if name not in self.ignored]
            return [name for name in columns if name not in new], {}
        types = {name: type_of(name) for name in new}
        self.columns += new
        self.added |= types
        return list(columns), types

    def report(self) -> dict[str, list[str]]:
        """What the result says."""
        named = {"added": list(self.added), "ignored": self.ignored}
        return {word: names for word, names in named.items() if names}


def postgres_type(chunk: Chunk, column: str) -> str:
    """The type of a new column of PostgreSQL for the values that a chunk has in it."""
    if isinstance(chunk.data, pa.Table):
        return _of_arrow(chunk.data.schema.field(column).type)
    return _of_values({type(row[column]) for row in chunk.data if row.get(column) is not None})


def duckdb_type(chunk: Chunk, column: str) -> str:
    """As :func:`postgres_type`, of DuckDB."""
    type_name = postgres_type(chunk, column)
    return {"double precision": "DOUBLE", "jsonb": "JSON", "bytea": "BLOB"}.get(type_name, type_name)


_SIMPLE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: kind in (pa.int8(), pa.int16(), pa.uint8()), "smallint"),
    (lambda kind: kind in (pa.int32(), pa.uint16()), "integer"),
    (lambda kind: kind == pa.uint64(), "numeric"),
    (pa.types.is_integer, "bigint"),
    (lambda kind: kind == pa.float32(), "real"),
    (pa.types.is_floating, "double precision"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "interval"),
    (pa.types.is_interval, "interval"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_fixed_size_binary, "bytea"),
)


def _of_arrow(kind: Any) -> str:
    if pa.types.is_dictionary(kind):
        return _of_arrow(kind.value_type)
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _of_arrow(kind.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    if pa.types.is_nested(kind):
        return "jsonb"
    return next((name for test, name in _SIMPLE if test(kind)), "text")


_OF_VALUES: Mapping[frozenset[str], str] = {
    frozenset({"bool"}): "boolean",
    frozenset({"int"}): "bigint",
    frozenset({"float"}): "double precision",
    frozenset({"int", "float"}): "double precision",
    frozenset({"Decimal"}): "numeric",
    frozenset({"datetime"}): "timestamptz",
    frozenset({"date"}): "date",
    frozenset({"time"}): "time",
    frozenset({"timedelta"}): "interval",
    frozenset({"bytes"}): "bytea",
    frozenset({"UUID"}): "uuid",
    frozenset({"dict"}): "jsonb",
    frozenset({"list"}): "jsonb",
    frozenset({"dict", "list"}): "jsonb",
}


def _of_values(kinds: set[type]) -> str:
    return _OF_VALUES.get(frozenset(kind.__name__ for kind in kinds), "text")
