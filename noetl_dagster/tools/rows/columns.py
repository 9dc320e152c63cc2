"""The rule of each type of column: the form of its values in JSON, Arrow and DuckDB. A type decides, never a value.

Importing this module loads neither Arrow nor DuckDB.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

import asyncpg
from asyncpg.pgproto import pgproto

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import Numbers, loads_exact
from noetl_dagster.values import RefusedValueError, admit, encode_json

Convert = Callable[[Any], Any]

VALUE = "the value"  # for errors that name its place


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The forms of the values of one type of PostgreSQL.

    Attributes:
        json: converts a value of asyncpg to JSON; None if it is JSON.
        arrow: the Arrow type, by its alias; empty if the values decide.
        duckdb: the type of the JSON values; empty if the values decide.
        is_encoded: the JSON encoder writes the values of asyncpg as ``json`` converts them.
        is_copied: Arrow parses the text of COPY as the same value.
        is_key: the text of a value in Python and Arrow is parsed by the server as the same value.
    """

    json: Convert | None
    arrow: str = "string"
    duckdb: str = "VARCHAR"
    is_encoded: bool = False
    is_copied: bool = False
    is_key: bool = False


def finite(value: float | None) -> float | None:
    """Returns a number as JSON has it: NaN is null; raises ``RefusedValueError`` for an infinite one."""
    return value if value is None or math.isfinite(value) else admit(value, VALUE)


def all_finite(values: Sequence[float | None]) -> bool:
    """Reports whether no number of a column is infinite or NaN; may be wrong if the sum of all is infinite."""
    try:
        return math.isfinite(sum(values))  # type: ignore[arg-type]
    except TypeError:  # nulls
        return math.isfinite(sum(value for value in values if value is not None))


def decimal_text(value: Decimal | None) -> str | None:
    """Returns a decimal as text with all its digits; NaN is null; raises ``RefusedValueError`` for an infinite one."""
    text = None if value is None else str(value)
    return text if text is None or (text[-1].isdigit() and "E" not in text) else admit(value, VALUE)


def moment_text(value: dt.datetime | None) -> str | None:
    """Returns a time of PostgreSQL as ISO 8601; an infinite one as the server writes it."""
    if value is None:
        return None
    infinite = _INFINITE.get(id(value))
    return value.isoformat() if infinite is None else infinite


INFINITIES: Mapping[str, dt.datetime] = {
    "infinity": pgproto.infinity_datetime,
    "-infinity": pgproto.negative_infinity_datetime,
}
"""The objects that stand for infinite times in asyncpg. The last and the first moment are equal, but others."""
_INFINITE = {id(value): text for text, value in INFINITIES.items()}


def _bytes_text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _iso(value: dt.date | dt.time | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else value.isoformat()


_PLAIN = frozenset({str, int, bool, type(None)})


def row_value(value: Any) -> Any:
    """Converts any value of a driver to a JSON value: records become mappings, ranges their parts, addresses text."""
    if type(value) in _PLAIN:
        return value
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
    if isinstance(value, dt.datetime):
        return moment_text(value)
    return admit(value, VALUE)


_TEXT = ColumnType(None, is_copied=True)
_OTHER = ColumnType(row_value, "", "")

TYPES: Mapping[str, ColumnType] = {
    **dict.fromkeys(("int2", "int4", "int8"), ColumnType(None, "int64", "BIGINT", is_copied=True, is_key=True)),
    "oid": ColumnType(None, "int64", "BIGINT", is_copied=True),
    **dict.fromkeys(("float4", "float8"), ColumnType(finite, "double", "DOUBLE", is_encoded=True, is_copied=True)),
    "numeric": ColumnType(decimal_text, is_copied=True),  # in Arrow a decimal, if the column declares its scale
    **dict.fromkeys(("bpchar", "name", "citext", "xml", "unknown"), _TEXT),
    **dict.fromkeys(("money", "interval"), ColumnType(None)),
    **dict.fromkeys(("text", "varchar"), ColumnType(None, is_copied=True, is_key=True)),
    "bool": ColumnType(None, "bool", "BOOLEAN", is_copied=True),
    "date": ColumnType(_iso, "date32", is_encoded=True, is_copied=True, is_key=True),
    "timestamp": ColumnType(moment_text, "timestamp[us]", is_encoded=True, is_copied=True, is_key=True),
    "timestamptz": ColumnType(moment_text, "timestamp[us, UTC]", is_encoded=True, is_copied=True, is_key=True),
    "time": ColumnType(_iso, "time64[us]", is_encoded=True),
    "timetz": ColumnType(_iso),
    "bytea": ColumnType(_bytes_text, "binary"),
    "uuid": ColumnType(lambda value: None if value is None else str(value), is_copied=True, is_key=True),
    **dict.fromkeys(("inet", "cidr"), ColumnType(row_value)),
    **dict.fromkeys(("json", "jsonb"), ColumnType(None, duckdb="", is_copied=True)),
}
"""The types of PostgreSQL that have a rule; the values of any other type decide, as in composites and ranges."""


def column_type(name: str) -> ColumnType:
    """Returns the rule of a type of PostgreSQL, also of arrays (``int4[]`` or ``_int4``)."""
    element = element_of(name)
    if element is None:
        return TYPES.get(name, _OTHER)
    convert = column_type(element).json
    return ColumnType(convert and partial(_each, convert), "", "")


def element_of(name: str) -> str | None:
    """Returns the type of the elements of an array; None for other types."""
    return name[1:] if name.startswith("_") else name[:-2] if name.endswith("[]") else None


def json_converter(name: str, numbers: Numbers) -> Convert | None:
    """Returns the function that converts values of a type to JSON; with ``numbers: float`` decimals become doubles."""
    if name == "numeric" and numbers is Numbers.FLOAT:
        return lambda value: None if value is None else finite(float(value))
    return column_type(name).json


def integer(value: Any) -> int | None:
    """Returns a decimal without places as an integer; raises ``RefusedValueError`` beyond 64 bits."""
    whole: int | None = None if value is None else admit(int(value), VALUE)
    return whole


def converted(name: str, values: Sequence[Any], convert: Convert, first: int = 0) -> list[Any]:
    """Converts a column; raises ``ToolError`` with the row, after ``first`` others, of a value that has no form."""
    new: list[Any] = []
    try:
        for value in values:
            new.append(convert(value))  # noqa: PERF401
    except (ValueError, TypeError, RefusedValueError) as error:
        raise refused(first + len(new) + 1, name, error) from None
    return new


def _each(convert: Convert, value: Any) -> Any:
    return [_each(convert, item) for item in value] if isinstance(value, list) else convert(value)


def check_names(columns: Iterable[str], where: str) -> None:
    """Raises ``ToolError`` if two columns have one name: rows could hold only one of them."""
    names = set[str]()
    for name in columns:
        if name in names:
            raise ToolError(f"{where}: two columns are named {name!r}; rename one: SELECT ... AS other", kind="schema")
        names.add(name)


def refused(row: int, column: str, why: object) -> RefusedValueError:
    """Returns the error of a value that a crossing cannot carry; rows count from 1."""
    return RefusedValueError(f"row {row}, column {column}:", str(why))


_EPOCH = dt.date(2000, 1, 1).toordinal()
_INFINITE_DAYS = {(1 << 31) - 1: "infinity", -(1 << 31): "-infinity"}
_DAYS_OF_400_YEARS = 146_097


@lru_cache(4096)
def _date_of(value: tuple[int]) -> dt.date | str:
    """Returns a date of PostgreSQL; as the server writes it if Python has no such date."""
    [days] = value
    if days in _INFINITE_DAYS:
        return _INFINITE_DAYS[days]
    with_offset = days + _EPOCH
    if 0 < with_offset <= dt.date.max.toordinal():
        return dt.date.fromordinal(with_offset)
    periods, day = divmod(with_offset - 1, _DAYS_OF_400_YEARS)
    near = dt.date.fromordinal(day + 1)
    year = near.year + 400 * periods
    return f"{year if year > 0 else 1 - year:04}-{near:%m-%d}{'' if year > 0 else ' BC'}"


def _days_of(value: dt.date | str) -> tuple[int]:
    if isinstance(value, str):
        return (next(days for days, text in _INFINITE_DAYS.items() if text == value),)
    return (value.toordinal() - _EPOCH,)


def interval_text(months: int, days: int, microseconds: int) -> str:
    """Returns an interval as PostgreSQL and DuckDB read it: ``1 mon 2 days 00:00:00.5``."""
    parts = [f"{count} {unit}{'' if count == 1 else 's'}" for count, unit in ((months, "mon"), (days, "day")) if count]
    if microseconds or not parts:
        minutes, rest = divmod(abs(microseconds), 60_000_000)
        fraction = f".{rest % 1_000_000:06}".rstrip("0").rstrip(".")
        sign = "-" if microseconds < 0 else ""
        parts.append(f"{sign}{minutes // 60:02}:{minutes % 60:02}:{rest // 1_000_000:02}{fraction}")
    return " ".join(parts)


def interval_parts(value: Any) -> tuple[int, ...]:
    """Returns the months, days and microseconds of seconds or a timedelta."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, dt.timedelta):
        value = dt.timedelta(seconds=float(value))
    return 0, value.days, value.seconds * 1_000_000 + value.microseconds


_FLOAT4 = struct.Struct("!f")


def _float4_of(data: bytes) -> float:
    """Returns the double with the fewest digits that are those of a number of 32 bits: 3.4, not 3.4000000953674316."""
    [value] = _FLOAT4.unpack(data)
    if not math.isfinite(value):
        return float(value)
    texts = (f"{value:.{digits}g}" for digits in (6, 7, 8))
    return next((near for text in texts if _FLOAT4.pack(near := float(text)) == data), float(f"{value:.9g}"))


_JSONB_VERSION = b"\x01"

CODECS: Mapping[str, tuple[str, Convert, Convert]] = {
    "json": ("binary", encode_json, loads_exact),
    "jsonb": ("binary", lambda value: _JSONB_VERSION + encode_json(value), lambda data: loads_exact(data[1:])),
    "date": ("tuple", _days_of, _date_of),
    "interval": ("tuple", interval_parts, lambda parts: interval_text(*parts)),
    "float4": ("binary", _FLOAT4.pack, _float4_of),
}
"""The format, encoder and decoder of JSON, as the event log writes it, and of types whose values asyncpg changes.

It takes 9999-12-31 for infinity, and 30 days for a month.
"""
