"""Decides what a value is when it is stored: one form for the event log, stored results, loops and workers.

A value enters at few places: a workload, a task's result, ``set``, ``output``, the items of a loop. There it is
*admitted*: it gets the form in which any later reader sees it, or it is refused with its place. ``jsonb`` decides the
form where it has no choice: the order of keys, and numbers without a sign of zero.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from functools import lru_cache, singledispatch
from pathlib import PurePath
from typing import Any
from uuid import UUID

import orjson

from noetl_dagster.errors import ToolError

MOST_LEVELS = 200
"""Lists and mappings inside each other in a value: encoders allow 254, and envelopes and events need some of them."""

INTEGER_BOUND = 1 << 63

_WRITTEN_WHOLE = 1e16
"""From this number on, floats are written with an exponent, which ``jsonb`` replaces by zeros."""

_DECIMAL_DIGITS = 400
"""Digits of a decimal that is written without an exponent, at most."""

_REMEMBERED_KEYS = 32
"""Keys of a mapping whose order is remembered, at most."""

_NAMED_LEVELS = 20
"""Steps into a value that name the place of a refused part, at most."""

_TABLE_PACKAGES = frozenset({"pandas", "pyarrow", "polars"})
_TABLE_TYPES = frozenset({"DataFrame", "Table", "RecordBatch"})
_LISTING = ("tolist", "to_pylist", "to_list")


class RefusedValueError(ToolError):
    """A value has no form in which it could be stored unchanged. The message names its place, its kind and the fix."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} {reason}", kind="transform", code="VALUE")

    def within(self, where: str) -> RefusedValueError:
        """Returns the error with the name of what the value belongs to."""
        return RefusedValueError(f"{where}:", str(self))


class _Refused(Exception):
    """The reason for which a value, or one inside it, is refused."""


def is_table(value: Any) -> bool:
    """Returns whether a value is a pandas, polars or Arrow table, which the result store keeps as Parquet.

    Imports none of them.
    """
    kind = type(value)
    return kind.__name__ in _TABLE_TYPES and kind.__module__.partition(".")[0] in _TABLE_PACKAGES


def keys_in_order(value: dict[Any, Any]) -> tuple[str, ...] | None:
    """Returns the keys of a mapping in the order of ``jsonb``, or None if they are not all text."""
    keys = tuple(value)
    return _order(keys) if len(keys) <= _REMEMBERED_KEYS else _order.__wrapped__(keys)


def admit(value: Any, place: str = "result") -> Any:
    """Returns a value in its stored form: JSON types only, in a copy that later changes of the original do not affect.

    ``docs/reference/values.md`` lists the form of every kind of value.

    Args:
        place: name of the value, with which the place of a refused part begins: ``result.rows[3].price``.

    Raises:
        RefusedValueError: the value, or a part of it, has no such form.
    """
    try:
        return _stored(value, 0)
    except _Refused as refused:
        raise RefusedValueError(place + "".join(_place_of_refused(value)), str(refused)) from None


def legible(value: Any) -> Any:
    """Returns a value for people to read, which is never refused: what has no stored form is shown as text."""
    try:
        return _stored(value, 0)
    except _Refused:
        pass
    if isinstance(value, Mapping):
        return {legible_text(str(key)): legible(item) for key, item in value.items()}
    return legible_text(str(value))


def legible_text(text: str) -> str:
    """Returns a message with U+FFFD or ``?`` for what PostgreSQL cannot store."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def encode_json(value: Any) -> bytes:
    """Returns an admitted value as JSON, or a message of the project, whose keys may be numbers.

    Raises:
        TypeError: the value was not admitted.
    """
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _stored(value: Any, level: int) -> Any:
    kind = value.__class__
    if kind is str:
        return value if value.isascii() and "\0" not in value else _text(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -INTEGER_BOUND <= value < 2 * INTEGER_BOUND else _refuse_integer()
    if kind is float:  # the sum has no sign of zero; a comparison with NaN is false
        return value + 0.0 if -_WRITTEN_WHOLE < value < _WRITTEN_WHOLE else _large_float(value)
    if level >= MOST_LEVELS:
        raise _Refused(f"is nested deeper than {MOST_LEVELS} levels, or holds itself; flatten it, or store it as text")
    if kind is dict:
        below = level + 1
        order = keys_in_order(value)
        if order is None:
            value = _with_text_keys(value, below)
            order = keys_in_order(value) or ()
        new: dict[str, Any] = {}
        for key in order:  # most values of rows need no call
            item = value[key]
            if item.__class__ is str:
                new[key] = item if item.isascii() and "\0" not in item else _text(item)
            elif item.__class__ is int and -INTEGER_BOUND <= item < INTEGER_BOUND:
                new[key] = item
            else:
                new[key] = _stored(item, below)
        return new
    if kind is list or kind is tuple:
        below = level + 1
        return [_stored(item, below) for item in value]
    return _stored(converted(value), level)


def _text(value: str) -> str:
    if "\0" in value:
        raise _Refused("holds a NUL character, which PostgreSQL cannot store; remove it, or give the bytes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Refused("holds half of a surrogate pair; decode the text with its encoding, or give the bytes") from None
    return value


def _refuse_integer() -> None:
    raise _Refused("is an integer beyond 64 bits; give it as text")


def _large_float(value: float) -> int | float | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise _Refused("is an infinite number, which JSON does not have; give null or a text")
    return int(value) if -INTEGER_BOUND <= value < 2 * INTEGER_BOUND else value


@lru_cache(maxsize=4096)
def _order(keys: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Returns the keys in the order of ``jsonb``, or None if they are not all text."""
    if not all(isinstance(key, str) for key in keys):
        return None
    return tuple(sorted((_text(str.__str__(key)) for key in keys), key=_bytes_order))


def _bytes_order(key: str) -> tuple[int, bytes]:
    encoded = key.encode()
    return len(encoded), encoded


def _with_text_keys(value: Mapping[Any, Any], level: int) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for key, item in value.items():
        plain = _stored(key, level)
        if plain is None or isinstance(plain, bool | int | float):
            plain = json.dumps(plain)
        if not isinstance(plain, str):
            raise _Refused(f"has a key of type {type(key).__name__}; keys must be text")
        if plain in texts:
            raise _Refused(f"has two keys that become {plain!r}; keys must be text")
        texts[plain] = item
    return texts


@singledispatch
def converted(value: Any) -> Any:
    """Converts a value of a type that JSON does not have to one of its types, of which parts may be converted again.

    Packages above this module register types of their own.

    Raises:
        _Refused: there is no such form.
    """
    # types of packages that are not imported here are recognised by their names and methods
    kind = type(value)
    if kind.__name__ == "NAType":  # the missing value of pandas
        return None
    if hasattr(value, "_undefined_name"):  # of Jinja
        raise _Refused("is not defined")
    if is_table(value):
        raise _Refused("is a table inside a value; give the table alone, or its rows")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if kind.__module__.partition(".")[0] == "numpy":
        return _of_numpy(value)
    if hasattr(value, "as_py"):  # a scalar of Arrow
        return value.as_py()
    for listing in _LISTING:  # columns of pandas, Arrow and polars
        if hasattr(value, listing) and not isinstance(value, type):
            return getattr(value, listing)()
    if isinstance(value, Iterable) and not isinstance(value, type):  # ranges, views, generators
        return list(value)
    raise _Refused(
        f"is of type {kind.__module__}.{kind.__qualname__}, which has no stored form; "
        "give mappings, lists, text, numbers, dates, or one pandas or Arrow table"
    )


def _decimal(value: Decimal) -> str | None:
    if value.is_nan():
        return None
    if value.is_infinite():
        return _large_float(math.inf)  # type: ignore[return-value]
    return format(value, "f") if abs(value.adjusted()) < _DECIMAL_DIGITS else str(value)


def _moment(value: dt.date | dt.time) -> str | None:
    return value.isoformat() if value == value else None  # pandas has a time that is missing


def _seconds(value: dt.timedelta) -> float | None:
    if value != value:
        return None
    seconds, exact = value.total_seconds(), dt.timedelta(value.days, value.seconds, value.microseconds)
    nanoseconds: int = getattr(value, "nanoseconds", 0)  # of pandas
    if dt.timedelta(seconds=seconds) != exact or nanoseconds:
        raise _Refused("is a duration that seconds cannot hold exactly; give it as text, or as whole units")
    return seconds


def _of_numpy(value: Any) -> Any:
    """Returns a scalar or an array of numpy as values of Python."""
    if value.ndim:
        return list(value) if value.dtype.kind in "mMO" else value.tolist()
    if value.dtype.kind not in "mM":
        plain = value.tolist()
        if plain.__class__ is value.__class__:  # a number that Python does not have
            raise _Refused(f"is of type numpy.{type(value).__name__}, which has no stored form; give a float or a text")
        return plain
    if value != value:
        return None
    if value.dtype.kind == "M":
        plain = value.tolist()
        return str(value) if isinstance(plain, int) else plain
    micros = value.astype("timedelta64[us]")
    if micros != value:
        raise _Refused("is a duration that seconds cannot hold exactly; give it as text, or as whole units")
    return micros.tolist()


def _sorted(value: Iterable[Any]) -> list[Any]:
    return sorted((_stored(item, 1) for item in value), key=lambda item: (type(item).__name__, _sort_key(item)))


def _sort_key(item: Any) -> Any:
    return item if isinstance(item, str | int | float) else orjson.dumps(item).decode()


_CONVERSIONS: dict[type, Any] = {
    str: str.__str__,  # of subclasses, like the next two
    int: int.__int__,
    float: float.__float__,
    Enum: lambda value: value.value,
    Decimal: _decimal,
    dt.date: _moment,
    dt.time: _moment,
    dt.timedelta: _seconds,
    UUID: str,
    PurePath: str,
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value: base64.b64encode(bytes(value)).decode()),
    Mapping: dict,
    list: list,
    tuple: list,
    **dict.fromkeys((set, frozenset), _sorted),
    BaseException: lambda value: f"{type(value).__name__}: {value}",
}
for _kind, _convert in _CONVERSIONS.items():
    converted.register(_kind, _convert)


def _place_of_refused(value: Any) -> Iterator[str]:
    """Yields the steps that lead to the part that is refused: ``.key``, ``[index]``."""
    for level in range(1, _NAMED_LEVELS + 1):
        for step, item in _parts(value):
            try:
                _stored(item, level)
            except _Refused:
                yield step
                value = item
                break
        else:
            return


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return ((f".{key}", item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    return iter(())
