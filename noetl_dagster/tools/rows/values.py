"""Converts values to PostgreSQL parameters, and the values of its rows to JSON."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import asyncpg
import orjson

from noetl_dagster.values import admit

_INTEGERS = frozenset({"int2", "int4", "int8", "oid"})
_FLOATS = frozenset({"float4", "float8"})
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "citext", "xml", "unknown"})
_AS_THEY_ARE = _INTEGERS | _TEXTS | {"bool", "json", "jsonb"}
_TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "off", "0"})


def parameter(value: Any, type_name: str) -> Any:
    """Converts a template's value to the one that asyncpg needs for a parameter of a type.

    Templates render text and JSON values: ``"3"`` is accepted for an integer, ``3`` for text, ISO 8601 text for
    dates and times, base64 text for ``bytea``, a mapping or list as JSON text for ``text``. Text that holds
    a JSON object or list is that object or list for ``json`` and ``jsonb``, other text a JSON string.

    Raises:
        ValueError: the value has no form of that type; names both.
    """
    if value is None:
        return None
    if type_name.endswith("[]"):
        return _array(value, type_name.removesuffix("[]"))
    convert = _PARAMETERS.get(type_name)
    if convert is None:
        return value
    try:
        return convert(value)
    except (ValueError, TypeError, InvalidOperation) as error:
        shown = repr(value) if len(repr(value)) <= 80 else type(value).__name__
        raise ValueError(f"{shown} is not a value of type {type_name}") from error


def _array(value: Any, element: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = orjson.loads(value)
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"a list is needed for type {element}[], not {type(value).__name__}")
    return [_array(item, element) if isinstance(item, list) else parameter(item, element) for item in value]


def _integer(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("not a whole number")
    return int(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    plain = admit(value)
    if isinstance(value, Mapping | list | tuple):
        return orjson.dumps(plain).decode()
    return str(plain)


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ValueError("neither true nor false")
    return bool(value)


def _datetime(value: Any) -> dt.datetime:
    if isinstance(value, str):
        return dt.datetime.fromisoformat(value.strip())
    if isinstance(value, dt.datetime):
        return value
    if isinstance(value, dt.date):
        return dt.datetime(value.year, value.month, value.day)
    return dt.datetime.fromtimestamp(value, dt.UTC)


def _timestamptz(value: Any) -> dt.datetime:
    """Takes a time without zone as UTC, so that a playbook means the same on every machine."""
    moment = _datetime(value)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def _timestamp(value: Any) -> dt.datetime:
    moment = _datetime(value)
    return moment if moment.tzinfo is None else moment.astimezone(dt.UTC).replace(tzinfo=None)


def _date(value: Any) -> dt.date:
    if isinstance(value, str):
        return dt.date.fromisoformat(value.strip()[:10])
    if isinstance(value, dt.datetime):
        return value.date()
    if isinstance(value, dt.date):
        return value
    raise ValueError("not a date")


def _time(value: Any) -> dt.time:
    return dt.time.fromisoformat(value.strip()) if isinstance(value, str) else value


def _interval(value: Any) -> dt.timedelta:
    if isinstance(value, str):
        value = float(value)
    return dt.timedelta(seconds=value) if isinstance(value, int | float) else value


def _json(value: Any) -> Any:
    """Parses text that is a JSON object or list; other text is a JSON string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return admit(value, "a JSON parameter")


def _bytea(value: Any) -> bytes:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value)


_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_FLOATS, float),
    **dict.fromkeys(_TEXTS, _text),
    "bool": _boolean,
    "numeric": lambda value: Decimal(str(value).strip()),
    "timestamptz": _timestamptz,
    "timestamp": _timestamp,
    "date": _date,
    "time": _time,
    "timetz": _time,
    "interval": _interval,
    "bytea": _bytea,
    "json": _json,
    "jsonb": _json,
    "uuid": str,
}


def column_converter(type_name: str) -> Callable[[Any], Any] | None:
    """Returns the function that converts a column's values to JSON values; None if they are JSON values."""
    if type_name in _AS_THEY_ARE:
        return None
    if type_name == "numeric":
        return admit
    return row_value


def row_value(value: Any) -> Any:
    """Converts any value of asyncpg to a JSON value: records become mappings, ranges their parts, addresses text."""
    if isinstance(value, list):
        return [row_value(item) for item in value]
    if isinstance(value, asyncpg.Record):
        return {name: row_value(item) for name, item in value.items()}
    if isinstance(value, asyncpg.Range):
        return {
            "lower": row_value(value.lower),
            "upper": row_value(value.upper),
            "lower_inclusive": value.lower_inc,
            "upper_inclusive": value.upper_inc,
            "empty": value.isempty,
        }
    if isinstance(value, asyncpg.BitString):
        return value.as_string()
    if type(value).__module__ == "ipaddress":
        return str(value)
    if isinstance(value, tuple) and type(value).__module__.startswith("asyncpg"):  # geometric types
        return [row_value(item) for item in value]
    return admit(value, "a column")
