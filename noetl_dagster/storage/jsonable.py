"""Converts Python values to JSON values, which results can hold."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

INTEGER_BOUND = 1 << 63
_PLAIN = frozenset({str, bool, type(None)})
_TABLE_PACKAGES = frozenset({"pandas", "pyarrow", "polars"})
_TABLE_TYPES = frozenset({"DataFrame", "Table", "RecordBatch"})


class NotJsonableError(TypeError):
    """A value has no JSON form; the message names its type and its place in the result."""


def is_table(value: Any) -> bool:
    """Returns whether a value is a pandas, polars or Arrow table, which the result store keeps as Parquet.

    Imports none of them.
    """
    kind = type(value)
    return kind.__name__ in _TABLE_TYPES and kind.__module__.partition(".")[0] in _TABLE_PACKAGES


def to_jsonable(value: Any, path: str = "result") -> Any:
    """Returns the JSON form of a value; a copy, which later changes of the original do not affect.

    Sets and tuples become lists (sets sorted if possible), dates and times ISO 8601 text, durations
    seconds, ``Decimal`` an exact number or text, UUIDs and paths text, bytes base64 text, NaN and infinities
    null, numpy scalars and arrays numbers and lists, dataclasses and pydantic models mappings.

    Raises:
        NotJsonableError: for any other type, and for integers beyond 64 bits.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if -INTEGER_BOUND <= value < 2 * INTEGER_BOUND:
            return value
        raise NotJsonableError(f"{path} is an integer beyond 64 bits; convert it to text")
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is dict:
        return {_key(key, path): to_jsonable(item, f"{path}.{key}") for key, item in value.items()}
    if kind is list or kind is tuple:
        return [to_jsonable(item, path) for item in value]
    return _convert(value, path)


def _key(key: Any, path: str) -> str:
    if type(key) is str:
        return key
    plain = to_jsonable(key, f"a key of {path}")
    if isinstance(plain, str):
        return plain
    if plain is None or isinstance(plain, bool | int | float):
        return json.dumps(plain)
    raise NotJsonableError(f"{path} has a key of type {type(key).__name__}; keys must be text")


def _convert(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return to_jsonable(value.value, path)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | int):
        return to_jsonable(int(value), path)
    if isinstance(value, float):
        return to_jsonable(float(value), path)
    if isinstance(value, Decimal):
        return number_of(value)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat() if value == value else None  # pandas has a time that is missing
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, UUID | PurePath):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, Mapping):
        return to_jsonable(dict(value), path)
    if isinstance(value, set | frozenset):
        items = to_jsonable(list(value), path)
        with suppress(TypeError):
            return sorted(items)
        return items
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return to_jsonable({field.name: getattr(value, field.name) for field in fields}, path)
    # types of packages that are not imported here are recognised by their methods
    if hasattr(value, "model_dump"):  # pydantic
        return to_jsonable(value.model_dump(mode="json"), path)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, pandas series
        return to_jsonable(value.tolist(), path)
    if is_table(value):
        raise NotJsonableError(f"{path} is a table inside a result; return the table alone or its rows")
    if isinstance(value, Iterable) and not isinstance(value, type):  # ranges, views, generators
        return [to_jsonable(item, path) for item in value]
    raise NotJsonableError(
        f"{path} is of type {type(value).__module__}.{type(value).__qualname__}, which has no JSON form; "
        "return mappings, lists, text, numbers, dates, or one pandas or Arrow table"
    )


def number_of(value: Decimal) -> int | float | str | None:
    """Returns a decimal as a JSON number if that is exact, else as text; NaN and infinities are null."""
    if not value.is_finite():
        return None
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and exponent >= 0:
        whole = int(value)
        return whole if -INTEGER_BOUND <= whole < INTEGER_BOUND else str(whole)
    near = float(value)
    return near if Decimal(repr(near)) == value else str(value)
