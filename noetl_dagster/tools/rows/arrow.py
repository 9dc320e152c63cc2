"""Arrow tables of rows, and the JSON values of Arrow columns. Errors name the row and the column."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from noetl_dagster.errors import ToolError
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.rows.columns import (
    INFINITIES,
    VALUE,
    column_type,
    date_text,
    decimal_text,
    finite,
    interval_text,
    refused,
    row_value,
)
from noetl_dagster.values import RefusedValueError, admit

Row = Mapping[str, Any]

MOST_DIGITS = 38  # of a decimal of DuckDB and of Arrow's 128 bits
_EXCERPT = 80
_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError)

_FITTING: tuple[tuple[Callable[[Any], bool], tuple[type, ...]], ...] = (
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (int, float)),
    (pa.types.is_decimal, (int, Decimal)),
    (pa.types.is_timestamp, (dt.datetime,)),
    (pa.types.is_date, (dt.date,)),
    (pa.types.is_time, (dt.time,)),
    (pa.types.is_binary, (bytes, bytearray, memoryview)),
)
"""The Python types that Arrow keeps in a column; it cuts the time of a datetime among dates, and 1.5 among integers."""


def is_text(kind: pa.DataType) -> bool:
    """Returns whether an Arrow type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def arrow_types(types: Mapping[str, str], decimals: Mapping[str, tuple[int, int]]) -> dict[str, pa.DataType]:
    """Returns the Arrow types of columns by their types in PostgreSQL, without those that their values decide.

    Args:
        decimals: the precision and scale of the columns that declare them.
    """
    aliases = {name: column_type(kind).arrow for name, kind in types.items()}
    known = {name: _arrow_type(alias) for name, alias in aliases.items() if alias}
    exact = {name: pa.decimal128(*of) for name, of in decimals.items() if 0 <= of[1] <= of[0] <= MOST_DIGITS}
    return known | exact


def _arrow_type(alias: str) -> pa.DataType:
    return pa.timestamp("us", "UTC") if alias == "timestamp[us, UTC]" else pa.type_for_alias(alias)


def arrow_table(
    rows: Sequence[Row] | pa.Table,
    schema: pa.Schema | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    first: int = 0,
) -> pa.Table:
    """Returns rows as an Arrow table of a schema, or of the types that their values show.

    Then decimals, identifiers, addresses and the like are text, and so are mappings whose keys differ between rows.
    Columns that are null in every row are text; those that a table lacks are null.

    Args:
        types: of columns whose values do not decide, if there is no schema.
        first: number of the rows before these, for errors.

    Raises:
        ToolError: the rows do not fit the schema.
    """
    if isinstance(rows, pa.Table):
        return rows if schema is None else _fitted(rows, schema)
    if schema is not None:
        kinds = dict(zip(schema.names, schema.types, strict=True))
        return pa.table(_columns(rows, kinds, kinds, first), schema=schema)
    table = _inferred(rows, types or {}, first)
    return table.cast(without_null(table.schema))


async def arrow_schema(batches: AsyncIterable[Sequence[Row]]) -> pa.Schema:
    """Returns the schema of all rows together; raises ``ToolError`` if the values of a column have no common type."""
    schema = pa.schema([])
    async for rows in batches:
        schema = await asyncio.to_thread(_widened, schema, rows)
    return without_null(schema)


def _widened(schema: pa.Schema, rows: Sequence[Row]) -> pa.Schema:
    """Returns a schema for rows and for earlier ones of a known schema."""
    new = _inferred(rows, {}, 0).schema
    for index, field in enumerate(schema):
        at = new.get_field_index(field.name)
        kinds = {field.type, new.field(at).type} if at >= 0 else set[Any]()
        if any(map(pa.types.is_nested, kinds)) and len({_keys_of(kind) for kind in kinds} - {None}) > 1:
            text = field.with_type(pa.string())
            schema, new = schema.set(index, text), new.set(at, text)
    try:
        return pa.unify_schemas([schema, new], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ToolError(f"rows of different types in one column: {error}; {_REMEDY}", kind="schema") from None


def _keys_of(kind: pa.DataType) -> Any:
    """Returns the names of the fields of a nested type; None for null, and no names for other types."""
    if pa.types.is_struct(kind):
        return tuple((field.name, _keys_of(field.type)) for field in kind)
    if pa.types.is_list(kind):
        return _keys_of(kind.value_type)
    return None if pa.types.is_null(kind) else ()


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        columns = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(len(table), field.type)
            for field in schema
        ]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ToolError(f"rows of different types in one column: {error}; {_REMEDY}", kind="schema") from None
    return pa.table(columns, schema=schema)


def _inferred(rows: Sequence[Row], types: Mapping[str, pa.DataType], first: int) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)  # not every row has every one
    return pa.table(dict(zip(names, _columns(rows, names, types, first), strict=True)))


def _columns(rows: Sequence[Row], names: Iterable[str], types: Mapping[str, pa.DataType], first: int) -> list[pa.Array]:
    return [arrow_column(name, [row.get(name) for row in rows], types.get(name), first) for name in names]


def without_null(schema: pa.Schema) -> pa.Schema:
    """Turns columns that are null in every row into text."""
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema])


def arrow_column(name: str, values: list[Any], kind: pa.DataType | None = None, first: int = 0) -> pa.Array:
    """Returns a column of a type, or of the one that its values show; raises ``ToolError`` if one does not fit."""
    if kind is not None and is_text(kind):
        values = [value if value is None or type(value) is str else _text(value) for value in values]
    elif (kind is None or pa.types.is_nested(kind)) and not set(map(type, values)) <= _SIMPLE:
        values = list(map(_arrow_value, values))
    try:
        array = pa.array(values, kind)
    except _MISFITS as error:
        raise _misfit(name, values, kind, first, error) from None
    if pa.types.is_nested(array.type) and not all(_has_keys(value, array.type) for value in values):
        if kind is None:
            return arrow_column(name, values, pa.string(), first)
        raise _misfit(name, values, kind, first, "its keys are others than in the rows before")
    if not _fits(values, array.type):
        raise _misfit(name, values, array.type, first, f"{array.type} would change it")
    return array


_SIMPLE = {str, int, float, bool, bytes, dt.date, dt.datetime, dt.timedelta, type(None)}


def _arrow_value(value: Any) -> Any:
    """Returns a value that Arrow has a type for."""
    if isinstance(value, dict):
        return {key: _arrow_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_arrow_value(item) for item in value]
    if isinstance(value, dt.time) and value.tzinfo is None:
        return value
    if isinstance(value, str | int | float | bytes | dt.date | dt.timedelta | None):
        return value
    return _arrow_value(row_value(value))


def _text(value: Any) -> str:
    plain = str(value) if isinstance(value, Decimal) and not value.is_finite() else row_value(value)
    return plain if isinstance(plain, str) else orjson.dumps(plain).decode()


def _has_keys(value: Any, kind: pa.DataType) -> bool:
    """Returns whether each mapping has all keys of its type, which would be null otherwise, and any key at all."""
    if pa.types.is_struct(kind):
        names = {field.name for field in kind}
        return value is None or (
            bool(names) and value.keys() == names and all(_has_keys(value[field.name], field.type) for field in kind)
        )
    if pa.types.is_list(kind):
        return value is None or all(_has_keys(item, kind.value_type) for item in value)
    return True


def _fits(values: Sequence[Any], kind: pa.DataType) -> bool:
    fitting = next((types for test, types in _FITTING if test(kind)), None)
    if fitting is None:
        return True
    kinds = set(map(type, values)) - {type(None)}
    if not all(issubclass(each, fitting) for each in kinds) or (bool in kinds and fitting != (bool,)):
        return False
    if fitting == (dt.date,):
        return not any(issubclass(each, dt.datetime) for each in kinds)
    if fitting == (dt.datetime,):
        zoned = {value.tzinfo is not None for value in values if value is not None}
        return len(zoned) < 2 and not any(value is infinity for value in values for infinity in INFINITIES.values())
    return True


_REMEDY = "convert the column in the source"


def _misfit(name: str, values: Sequence[Any], kind: pa.DataType | None, first: int, why: object) -> ToolError:
    """Returns the error of a column, with its first value that does not fit."""
    row, value = next(
        ((row, value) for row, value in enumerate(values, 1) if value is not None and not _is_fine(value, kind)),
        (0, None),
    )
    if not row:  # each fits alone
        kinds = {
            (type(value), getattr(value, "tzinfo", None) is None): (row, value)
            for row, value in reversed([*enumerate(values, 1)])
            if value is not None
        }
        row, value = max(kinds.values(), key=lambda item: item[0])
    infinite = next((text for text, infinity in INFINITIES.items() if infinity is value), None)
    shown = infinite or SECRETS.beginning(repr(value), _EXCERPT)
    return refused(first + row, name, f"{shown} does not fit the type of the column ({why}); {_REMEDY}")


def _is_fine(value: Any, kind: pa.DataType | None) -> bool:
    try:
        array = pa.array([value], kind)
    except _MISFITS:
        return False
    return _fits([value], array.type) and _has_keys(value, array.type)


def json_rows(rows: pa.Table | pa.RecordBatch, numbers: Numbers = Numbers.TEXT, first: int = 0) -> list[dict[str, Any]]:
    """Returns the rows of a table with JSON values.

    Args:
        numbers: the form of decimals that have places.
        first: number of the rows before these, for errors.

    Raises:
        ToolError: a value has no JSON form.
    """
    names = rows.schema.names
    converted: list[dict[str, Any]] = []
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
        columns = [_json_column(name, batch.column(index), numbers, first) for index, name in enumerate(names)]
        converted += [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        first += batch.num_rows
    return converted


def _json_column(name: str, array: pa.Array, numbers: Numbers, first: int) -> list[Any]:
    try:
        return json_values(array, numbers)
    except (ValueError, RefusedValueError) as error:
        for row in range(len(array)):
            try:
                json_values(array.slice(row, 1), numbers)
            except (ValueError, RefusedValueError):
                raise refused(first + row + 1, name, error) from None
        raise


def json_values(array: pa.Array, numbers: Numbers = Numbers.TEXT) -> list[Any]:
    """Returns the values of a column as JSON; raises ``ValueError``, ``RefusedValueError`` if one has no such form."""
    kind, types = array.type, pa.types
    convert = next((convert for test, convert in _JSON if test(kind)), None)
    if types.is_decimal(kind):
        return _decimals(array, numbers)
    if types.is_dictionary(kind):
        return json_values(array.dictionary_decode(), numbers)
    if types.is_struct(kind):
        fields = [json_values(field, numbers) for field in array.flatten()]
        names = [field.name for field in kind]
        return [
            dict(zip(names, values, strict=True)) if valid else None
            for valid, *values in zip(array.is_valid().to_pylist(), *fields, strict=True)
        ]
    if types.is_map(kind):
        item = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        pairs = json_values(array.cast(pa.list_(item)), numbers)
        mappings = (None if some is None else {one["key"]: one["value"] for one in some} for some in pairs)
        return [admit(mapping) for mapping in mappings]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        items = iter(json_values(array.flatten(), numbers))
        return [None if size is None else list(islice(items, size)) for size in pc.list_value_length(array).to_pylist()]
    return array.to_pylist() if convert is None else convert(array)


def _decimals(array: pa.Array, numbers: Numbers) -> list[Any]:
    if array.type.scale <= 0:
        try:
            return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
        except pa.ArrowInvalid:
            return [None if value is None else admit(int(value), VALUE) for value in array.to_pylist()]
    if numbers is Numbers.FLOAT:
        return array.cast(pa.float64()).to_pylist()  # type: ignore[no-any-return]
    texts: list[Any] = array.cast(pa.string()).to_pylist()
    if any("E" in text for text in texts if text is not None):
        return [decimal_text(value) for value in array.to_pylist()]
    return texts


def _floats(array: pa.Array) -> list[Any]:
    if array.type != pa.float64():  # with the fewest digits: 3.4, not 3.4000000953674316
        array = array.cast(pa.string()).cast(pa.float64())
    values = array.to_pylist()
    return values if pc.all(pc.is_finite(array)).as_py() is not False else list(map(finite, values))


_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = dt.date(1970, 1, 1).toordinal()
_LAST_DAY = dt.date.max.toordinal() - _EPOCH


def _dates(array: pa.Array) -> list[Any]:
    days = array.cast(pa.date32()).cast(pa.int32())
    if not _beyond(days, 1):
        return array.cast(pa.date32()).cast(pa.string()).to_pylist()  # type: ignore[no-any-return]
    return [None if day is None else date_text(day) for day in days.to_pylist()]


def _moments(array: pa.Array) -> list[Any]:
    unit, zone = array.type.unit, array.type.tz
    array = array.cast(pa.timestamp(unit, zone and "UTC")).cast(pa.timestamp(unit))
    suffix = "" if zone is None else "+00:00"
    counts, of_day = array.cast(pa.int64()), 86_400 * _UNITS[unit]
    if _beyond(counts, of_day):
        return [None if count is None else _moment(count, unit, suffix) for count in counts.to_pylist()]
    return _clock(pc.replace_substring(array.cast(pa.string()), " ", "T", max_replacements=1), suffix)


def _moment(count: int, unit: str, suffix: str) -> str:
    """Returns a moment of which some in the column are infinite, or out of the years from 1 to 9999."""
    if abs(count) >= (1 << 63) - 1:
        return "infinity" if count > 0 else "-infinity"
    day, rest = divmod(count, 86_400 * _UNITS[unit])
    [time] = _clock(pa.array([rest * 10**9 // _UNITS[unit]], pa.time64("ns")).cast(pa.string()), suffix)
    date, blank, era = date_text(day).partition(" ")
    return f"{date}T{time}{blank}{era}"


def _times(array: pa.Array) -> list[Any]:
    texts = _clock(array.cast(pa.string()), "")
    return [text if text is None or text[0] != "<" else "24:00:00" for text in texts]


def _clock(texts: pa.Array, suffix: str) -> list[Any]:
    """Returns texts of times with as many places as ISO 8601 of Python: none, 6, or 9 of nanoseconds."""
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})000$", r"\1")
    texts = pc.replace_substring_regex(texts, r"\.0+$", "")
    return (pc.binary_join_element_wise(texts, suffix, "") if suffix else texts).to_pylist()  # type: ignore[no-any-return]


def _beyond(counts: pa.Array, of_day: int) -> bool:
    """Returns whether a count since 1970 is out of the years from 1 to 9999."""
    ends = pc.min_max(counts).as_py()
    return ends["min"] is not None and (ends["min"] < (1 - _EPOCH) * of_day or ends["max"] >= (_LAST_DAY + 1) * of_day)


def check_times(table: pa.Table, first: int) -> None:
    """Raises ``ToolError`` for an infinite date or time, as DuckDB exports them: other readers take it for a number."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
            count = pa.int32() if pa.types.is_date32(kind) else pa.int64()
            last = (1 << (count.bit_width - 1)) - 1
            infinite = pc.greater_equal(pc.abs(column.cast(count)), last)
            if pc.any(infinite).as_py():
                row = first + pc.index(infinite, True).as_py() + 1
                raise refused(row, name, f"an infinite {kind} has no form in the target; convert it in the source")


def plain_rows(rows: Sequence[Row] | pa.Table, first: int = 0) -> list[dict[str, Any]]:
    """Returns rows with JSON values; raises as :func:`json_rows`."""
    if isinstance(rows, pa.Table):
        return json_rows(rows, first=first)
    converted = []
    for number, row in enumerate(rows, first + 1):
        plain: dict[str, Any] = {}
        name = ""
        try:
            for name, value in row.items():
                plain[name] = row_value(value)
        except (ValueError, RefusedValueError) as error:
            raise refused(number, name, error) from None
        converted.append(plain)
    return converted


def _plain(array: pa.Array) -> list[Any]:
    return [admit(value, VALUE) for value in array.to_pylist()]


def _intervals(array: pa.Array) -> list[Any]:
    parts: Iterator[Any] = iter(array.to_pylist())
    return [None if part is None else interval_text(part.months, part.days, part.nanoseconds // 1000) for part in parts]


def _bytes(array: pa.Array) -> list[Any]:
    return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]


_JSON: tuple[tuple[Callable[[Any], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (pa.types.is_floating, _floats),
    (pa.types.is_date, _dates),
    (pa.types.is_timestamp, _moments),
    (pa.types.is_time, _times),
    (pa.types.is_interval, _intervals),
    (pa.types.is_binary, _bytes),
    (pa.types.is_large_binary, _bytes),
    (pa.types.is_fixed_size_binary, _bytes),
    (pa.types.is_duration, _plain),
    (pa.types.is_union, _plain),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _plain),
)
