"""Converts the values of templates to parameters of PostgreSQL."""

from __future__ import annotations

import base64
import datetime as dt
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from noetl_dagster.storage.exact_json import loads_exact
from noetl_dagster.tools.rows.columns import INFINITIES, interval_parts
from noetl_dagster.values import admit

_INTEGERS = frozenset({"int2", "int4", "int8", "oid"})
_FLOATS = frozenset({"float4", "float8"})
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "citext", "xml", "unknown"})
_TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "off", "0"})
_NANOSECONDS = re.compile(r"[.,]\d{6}\d*[1-9]")


def parameter(value: Any, type_name: str) -> Any:
    """Converts a template's value to the one that asyncpg needs for a parameter of a type.

    Templates render text and JSON values: ``"3"`` is accepted for an integer, ``3`` for text, ISO 8601 text for
    dates and times, base64 text for ``bytea``, a mapping or list as JSON text for ``text``.
    A time with an offset becomes one of UTC, also for ``timestamp`` and ``date``. Text that begins as a JSON object or
    list is that object or list for ``json`` and ``jsonb``, other text a JSON string.

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
    except (ValueError, TypeError, InvalidOperation, OverflowError) as error:
        shown = repr(value) if len(repr(value)) <= 80 else type(value).__name__
        raise ValueError(f"{shown} is not a value of type {type_name} ({error})") from error


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


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return Decimal(str(value).strip())


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    elif value in (0, 1):
        return bool(value)
    raise ValueError("neither true nor false")


def _datetime(value: Any) -> dt.datetime:
    if isinstance(value, str):
        text = value.strip()
        if _NANOSECONDS.search(text):
            raise ValueError("PostgreSQL has microseconds")
        return INFINITIES[text] if text in INFINITIES else dt.datetime.fromisoformat(text)
    if isinstance(value, dt.datetime):
        return value
    if isinstance(value, dt.date):
        return dt.datetime(value.year, value.month, value.day)
    return dt.datetime.fromtimestamp(value, dt.UTC)


def _timestamptz(value: Any) -> dt.datetime:
    """Takes a time without zone as UTC, so that a playbook means the same on every machine."""
    moment = _datetime(value)
    return moment if moment.tzinfo is not None or _is_infinite(moment) else moment.replace(tzinfo=dt.UTC)


def _timestamp(value: Any) -> dt.datetime:
    moment = _without_zone(value)
    if moment in INFINITIES.values() and not _is_infinite(moment):
        raise ValueError("asyncpg takes it for infinity; pass it as text: CAST(CAST(:name AS text) AS timestamp)")
    return moment


def _without_zone(value: Any) -> dt.datetime:
    moment = _datetime(value)
    return moment if moment.tzinfo is None else moment.astimezone(dt.UTC).replace(tzinfo=None)


def _is_infinite(moment: dt.datetime) -> bool:
    return any(moment is infinity for infinity in INFINITIES.values())


def _date(value: Any) -> dt.date | str:
    """Returns the day of a time in UTC, as a ``timestamp`` has it."""
    if isinstance(value, str) and value.strip() in INFINITIES:
        return value.strip()
    if isinstance(value, int | float):
        raise ValueError("not a date")
    return _without_zone(value).date()


def _time(value: Any) -> dt.time:
    return dt.time.fromisoformat(value.strip()) if isinstance(value, str) else value


def _json(value: Any) -> Any:
    """Parses text that begins as a JSON object or list; other text is a JSON string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return loads_exact(value)
    return admit(value, "a JSON parameter")


def bytes_of(value: Any) -> bytes:
    """Returns the bytes of base64 text, of hex digits as PostgreSQL writes them, or of a buffer."""
    if not isinstance(value, str):
        return memoryview(value).tobytes()
    try:
        return bytes.fromhex(value[2:]) if value.startswith("\\x") else base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError(r"bytes are base64 text, or hex digits after \x") from None


_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_FLOATS, float),
    **dict.fromkeys(_TEXTS, _text),
    "bool": _boolean,
    "numeric": _decimal,
    "timestamptz": _timestamptz,
    "timestamp": _timestamp,
    "date": _date,
    "time": _time,
    "timetz": _time,
    "interval": interval_parts,
    "bytea": bytes_of,
    "json": _json,
    "jsonb": _json,
    "uuid": str,
}
