"""Encodes columns in the CSV format of PostgreSQL's COPY; the server turns the text into its column types.

An unquoted empty field is null, a quoted one is empty text. Columns that Arrow writes as the server parses them never
become Python objects; the others are converted value by value.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from noetl_dagster.tools.rows.arrow import is_text
from noetl_dagster.tools.rows.columns import converted, interval_parts, interval_text, row_value
from noetl_dagster.tools.rows.values import bytes_of

_OPTIONS = arrow_csv.WriteOptions(include_header=False, batch_size=65_536)
_JSON = frozenset({"json", "jsonb"})
_NOT_PLAIN = _JSON | {"bytea"}
_NUMBERS = frozenset({"float4", "float8", "numeric"})
_TIMES = frozenset({"timestamptz", "timestamp", "date", "time"})


def encode_csv(
    rows: Sequence[Mapping[str, Any]] | pa.Table,
    columns: Sequence[str],
    types: Mapping[str, str],
) -> bytes:
    """Encodes rows as CSV; a missing column of a row is null.

    Args:
        types: type name of each column as in ``pg_type.typname`` (arrays begin with ``_``).
    """
    if isinstance(rows, pa.Table):
        encoded = [_of_arrow(name, rows.column(name), types[name]) for name in columns]
    else:
        encoded = [_of_values(name, [row.get(name) for row in rows], types[name]) for name in columns]
    out = pa.BufferOutputStream()
    arrow_csv.write_csv(pa.table(encoded, names=list(map(str, range(len(encoded))))), out, _OPTIONS)
    return bytes(out.getvalue().to_pybytes())


def _of_values(name: str, values: list[Any], type_name: str) -> Any:
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.nulls(len(values), pa.string())
    if kinds == {str} and type_name not in _NOT_PLAIN:
        return pa.array(values, pa.string())
    if kinds == {bool} and type_name == "bool":
        return pa.array(values, pa.bool_())
    if kinds == {float} and type_name in _NUMBERS:
        return pa.array(values, pa.float64())
    if kinds == {int}:
        with suppress(OverflowError):  # beyond 64 bits
            return pa.array(values, pa.int64())
    return _one_by_one(name, values, type_name)


def _of_arrow(name: str, column: Any, type_name: str) -> Any:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _of_arrow(name, column.cast(kind.value_type), type_name)
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.string())
    if (
        pa.types.is_integer(kind)
        or pa.types.is_decimal(kind)
        or (is_text(kind) and type_name not in _NOT_PLAIN)
        or (pa.types.is_boolean(kind) and type_name == "bool")
        or (pa.types.is_date(kind) and type_name in _TIMES)
    ):
        return column
    if pa.types.is_floating(kind) and type_name in _NUMBERS:
        return column if type_name == "float4" else column.cast(pa.float64())
    if pa.types.is_time(kind) and type_name in _TIMES:
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind) and type_name in _TIMES:
        if kind.tz is None:
            return column.cast(pa.string())
        # in UTC, because Arrow is slow at looking up the offset of each value
        text = column.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.timestamp(kind.unit)).cast(pa.string())
        return pc.binary_join_element_wise(text, "+00", "")
    return _one_by_one(name, column.to_pylist(maps_as_pydicts="strict"), type_name)


def _one_by_one(name: str, values: Sequence[Any], type_name: str) -> Any:
    texts = converted(name, values, lambda value: None if value is None else plain_text(value, type_name))
    return pa.array(texts, pa.string())


def plain_text(value: Any, type_name: str) -> str:
    """Returns the text from which the server makes a value of a type."""
    if type_name in _JSON:
        is_json = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
        return str(value) if is_json else orjson.dumps(row_value(value)).decode()
    if type_name == "bytea" or isinstance(value, bytes | bytearray | memoryview):
        return f"\\x{bytes_of(value).hex()}"
    if isinstance(value, str | float | Decimal):
        return str(value)
    if isinstance(value, dt.timedelta):
        return interval_text(*interval_parts(value))
    if isinstance(value, pa.MonthDayNano):
        return interval_text(value.months, value.days, value.nanoseconds // 1000)
    if isinstance(value, list | tuple) and type_name.startswith("_"):
        return _array(value, type_name[1:])
    plain = row_value(value)
    return plain if isinstance(plain, str) else orjson.dumps(plain).decode()


def _array(values: Sequence[Any], element: str) -> str:
    """Returns an array literal: ``{"a",NULL,{...}}``."""
    parts = []
    for value in values:
        if value is None:
            parts.append("NULL")
        elif isinstance(value, list | tuple) and element not in _JSON:
            parts.append(_array(value, element))
        else:
            escaped = plain_text(value, element).replace("\\", "\\\\").replace('"', '\\"')
            parts.append(f'"{escaped}"')
    return "{" + ",".join(parts) + "}"
