"""Arrow tables of rows, and the JSON values of Arrow columns. Errors name the row and the column."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    check_names,
    column_type,
    converted,
    decimal_text,
    finite,
    integer,
    interval_text,
    refused,
    row_value,
)
from noetl_dagster.values import RefusedValueError, admit

Row = Mapping[str, Any]

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
    exact = {name: pa.decimal128(*of) for name, of in decimals.items() if 0 <= of[1] <= of[0] <= 38}
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

    Then identifiers, addresses and the like are text, and so are mappings whose keys differ between rows.
    Columns that are null in every row are text; those that a table lacks are null.

    Args:
        types: of columns whose values do not decide, if there is no schema.
        first: number of the rows before these, for errors.

    Raises:
        ToolError: the rows do not fit the schema.
    """
    if isinstance(rows, pa.Table):
        with _one_type_a_column():
            return rows if schema is None else _fitted(rows, schema)
    if schema is not None:
        return _built(rows, dict(zip(schema.names, schema.types, strict=True)), first)
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
        if at >= 0 and len({_keys_of(field.type), _keys_of(new.field(at).type)} - {None}) > 1:
            schema, new = (each.set(n, field.with_type(pa.string())) for each, n in ((schema, index), (new, at)))
    with _one_type_a_column():
        return pa.unify_schemas([schema, new], promote_options="permissive")


def _keys_of(kind: pa.DataType) -> Any:
    """Returns the names of the fields of a nested type; None for null, and no names for other types."""
    if pa.types.is_struct(kind):
        return tuple((field.name, _keys_of(field.type)) for field in kind)
    return _keys_of(kind.value_type) if pa.types.is_list(kind) else None if pa.types.is_null(kind) else ()


@contextmanager
def _one_type_a_column() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ToolError(f"rows of different types in one column: {error}; {_REMEDY}", kind="schema") from None


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _inferred(rows: Sequence[Row], types: Mapping[str, pa.DataType], first: int) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)  # not every row has every one
    return _built(rows, {name: types.get(name) for name in names}, first)


def _built(rows: Sequence[Row], types: Mapping[str, pa.DataType | None], first: int) -> pa.Table:
    return pa.table(
        {name: arrow_column(name, [row.get(name) for row in rows], kind, first) for name, kind in types.items()}
    )


def without_null(schema: pa.Schema) -> pa.Schema:
    """Turns columns that are null in every row into text."""
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema])


def arrow_column(name: str, values: list[Any], kind: pa.DataType | None = None, first: int = 0) -> pa.Array:
    """Returns a column of a type, or of the one that its values show; raises ``ToolError`` if one does not fit."""
    kinds = set(map(type, values)) - {type(None)}
    if kind is None and kinds == {Decimal} and all(value is None or value.is_finite() for value in values):
        places = max(-value.as_tuple().exponent for value in values if value is not None)
        kind = pa.decimal128(38, min(38, max(0, places)))  # of a table, whose columns have one scale
    if kind is not None and is_text(kind):
        values = [value if value is None or type(value) is str else _text(value) for value in values]
    elif (kind is None or pa.types.is_nested(kind)) and not kinds <= _SIMPLE:
        values = list(map(_arrow_value, values))
    try:
        array = pa.array(values, kind)
    except _MISFITS as error:
        raise _misfit(name, values, kind, first, error) from None
    if kind is None and not all(_has_keys(value, array.type) for value in values):
        return arrow_column(name, values, pa.string(), first)
    if not _fits(values, array.type):
        raise _misfit(name, values, kind or array.type, first, "Arrow would change it")
    return array


_SIMPLE = {str, int, float, bool, bytes, dt.date, dt.datetime, dt.timedelta}


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
    if value is None or not pa.types.is_nested(kind):
        return True
    if not pa.types.is_struct(kind):
        return not pa.types.is_list(kind) or all(_has_keys(item, kind.value_type) for item in value)
    fields = {field.name: field.type for field in kind}
    return value.keys() == fields.keys() != set() and all(_has_keys(value[name], fields[name]) for name in fields)


def _fits(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Returns whether Arrow keeps values as they are."""
    if pa.types.is_nested(kind):
        return all(_has_keys(value, kind) for value in values)
    fitting = next((types for test, types in _FITTING if test(kind)), (object,))
    kinds = set(map(type, values)) - {type(None)}
    if not all(issubclass(each, fitting) for each in kinds) or (bool in kinds and int in fitting):
        return False
    if dt.datetime in fitting:
        zoned = {value.tzinfo is not None for value in values if value is not None}
        return len(zoned) < 2 and not any(value is infinity for value in values for infinity in INFINITIES.values())
    return dt.date not in fitting or not any(issubclass(each, dt.datetime) for each in kinds)


_REMEDY = "convert the column in the source"


def _misfit(name: str, values: Sequence[Any], kind: pa.DataType | None, first: int, why: object) -> ToolError:
    """Returns the error of a column, with the first value that does not fit, alone or beside the first one."""
    beside = next(value for value in values if value is not None)
    row = next((row for row, value in enumerate(values) if not _is_fine([value], kind)), None)
    if row is None:
        row = next((row for row, value in enumerate(values) if not _is_fine([beside, value], kind)), 0)
    infinite = next((text for text, infinity in INFINITIES.items() if infinity is values[row]), None)
    shown = infinite or SECRETS.beginning(repr(values[row]), _EXCERPT)
    return refused(first + row + 1, name, f"{shown} does not fit the type of the column ({why}); {_REMEDY}")


def _is_fine(values: list[Any], kind: pa.DataType | None) -> bool:
    try:
        return _fits(values, pa.array(values, kind).type)
    except _MISFITS:
        return False


def json_rows(rows: pa.Table | pa.RecordBatch, numbers: Numbers = Numbers.TEXT, first: int = 0) -> list[dict[str, Any]]:
    """Returns the rows of a table with JSON values.

    Args:
        numbers: the form of decimals that have places.
        first: number of the rows before these, for errors.

    Raises:
        ToolError: a value has no JSON form.
    """
    names = rows.schema.names
    check_names(names, "the table")
    plain: list[dict[str, Any]] = []
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
        columns = [_json_column(name, batch.column(index), numbers, first) for index, name in enumerate(names)]
        plain += [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        first += batch.num_rows
    return plain


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
    if types.is_dictionary(kind):
        return json_values(array.dictionary_decode(), numbers)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        rows = zip(*(json_values(field, numbers) for field in array.flatten()), strict=True)
        valid = array.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if is_valid else None for is_valid, row in zip(valid, rows, strict=True)
        ]
    if types.is_map(kind):
        item = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        pairs = json_values(array.cast(pa.list_(item)), numbers)
        return [None if some is None else admit({each["key"]: each["value"] for each in some}) for some in pairs]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        items = iter(json_values(array.flatten(), numbers))
        return [None if size is None else list(islice(items, size)) for size in pc.list_value_length(array).to_pylist()]
    if types.is_floating(kind):
        if kind != pa.float64():  # with the fewest digits: 3.4, not 3.4000000953674316
            array = array.cast(pa.string()).cast(pa.float64())
        return list(map(finite, array.to_pylist()))
    if types.is_decimal(kind) and kind.scale > 0 and numbers is Numbers.FLOAT:
        return array.cast(pa.float64()).to_pylist()  # type: ignore[no-any-return]
    if types.is_decimal(kind):
        return list(map(decimal_text if kind.scale > 0 else integer, array.to_pylist()))
    if types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind):
        return _iso(array)
    if types.is_interval(kind):
        return [part and interval_text(part.months, part.days, part.nanoseconds // 1000) for part in array.to_pylist()]
    return list(map(row_value, array.to_pylist()))


_OUTSIDE = {str((1 << 31) - 1): "infinity", str((1 << 63) - 1): "infinity"}
_OUTSIDE |= {f"-{number}": f"-{text}" for number, text in _OUTSIDE.items()} | {"86400000000": "24:00:00"}
"""The texts of values of DuckDB that are outside of the range of Arrow's dates and times, by their counts."""


def _iso(array: pa.Array) -> list[Any]:
    """Returns dates and times as ISO 8601: in UTC, with as many places as Python writes, and 9 of nanoseconds."""
    zone = array.type.tz if pa.types.is_timestamp(array.type) else None
    if zone is not None:
        array = array.cast(pa.timestamp(array.type.unit, "UTC")).cast(pa.timestamp(array.type.unit))
    texts = array.cast(pa.string())
    if pc.any(pc.starts_with(texts, "<")).as_py():
        texts = texts.to_pylist()
        return [
            _outside(text) if text and text[0] == "<" else _iso(array.slice(row, 1))[0]
            for row, text in enumerate(texts)
        ]
    texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})000$", r"\1")
    texts = pc.replace_substring_regex(texts, r"\.0+$", "")
    return (texts if zone is None else pc.binary_join_element_wise(texts, "+00:00", "")).to_pylist()  # type: ignore[no-any-return]


def _outside(text: str) -> str:
    number = text.strip("<>").rpartition(" ")[2]
    if number not in _OUTSIDE:
        raise ValueError(f"a date or time whose count is {number} is out of the years that Arrow knows")
    return _OUTSIDE[number]


def plain_rows(rows: Sequence[Row] | pa.Table, first: int = 0) -> list[dict[str, Any]]:
    """Returns rows with JSON values; raises as :func:`json_rows`."""
    if isinstance(rows, pa.Table):
        return json_rows(rows, first=first)
    try:
        return [{name: row_value(value) for name, value in row.items()} for row in rows]
    except (ValueError, RefusedValueError):
        for number, row in enumerate(rows, first):
            for name, value in row.items():
                converted(name, [value], row_value, number)
        raise


def check_times(table: pa.Table, first: int) -> None:
    """Raises ``ToolError`` for an infinite date or time, as DuckDB exports them: other readers take it for a number."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type):
            count = pa.int32() if pa.types.is_date32(column.type) else pa.int64()
            last = (1 << (count.bit_width - 1)) - 1
            infinite = pc.is_in(column.cast(count), pa.array([last, -last], count))
            if (row := pc.index(infinite, True).as_py()) >= 0:
                why = f"an infinite {column.type} has no form in the target; convert it in the source"
                raise refused(first + row + 1, name, why)
