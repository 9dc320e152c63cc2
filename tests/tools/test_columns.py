"""The rule of each type of column, without a service: rows to Arrow, Arrow to JSON, and values that have no form."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any
from uuid import UUID

import duckdb
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.rows.arrow import arrow_schema, arrow_table, check_times, json_rows
from noetl_dagster.tools.sql.duckdb import exported

UTC = dt.UTC
AWARE, NAIVE = dt.datetime(2026, 1, 2, tzinfo=UTC), dt.datetime(2026, 1, 2)
ZONED = dt.time(1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=2)))


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([ZONED], "string", ["01:02:03+02:00"]),
        ([Decimal("1234567890123456.7891"), None], "decimal128(38, 4)", [Decimal("1234567890123456.7891"), None]),
        ([Decimal("NaN")], "string", [None]),
        ([{"a": 1, "b": 2}, None], "struct<a: int64, b: int64>", [{"a": 1, "b": 2}, None]),
        ([{"a": 1}, {"b": 2}], "string", ['{"a":1}', '{"b":2}']),
        ([{}], "string", ["{}"]),
        ([[{"a": 1}], [{"a": None}, {}]], "string", ['[{"a":1}]', '[{"a":null},{}]']),
        ([dt.time(1, 2)], "time64[us]", [dt.time(1, 2)]),
        ([UUID(int=1)], "string", ["00000000-0000-0000-0000-000000000001"]),
        ([1, 1.5], "double", [1.0, 1.5]),
        ([None], "string", [None]),
        ([[Decimal("1.5")]], "list<item: string>", [["1.5"]]),
    ],
)
def test_the_type_that_values_show(values: list[Any], kind: str, stored: list[Any]) -> None:
    table = arrow_table([{"v": value} for value in values])
    assert (str(table.schema.field("v").type), table.column("v").to_pylist()) == (kind, stored)


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([1, None, "x"], 3),
        ([True, 2], 2),
        ([1, True], 2),
        ([9007199254740993, 1.5], 2),
        ([1, 2**63], 2),
        ([dt.date(2026, 1, 1), NAIVE], 2),
        ([NAIVE, AWARE], 2),
        ([b"x", "y"], 2),
        ([{"a": 1}, "x"], 2),
    ],
)
def test_values_that_do_not_fit_are_named(values: list[Any], row: int) -> None:
    rows = [{"v": value} for value in values]
    with pytest.raises(ToolError, match=f"row {row}, column v: .* does not fit the type of the column"):
        arrow_table(rows)


@pytest.mark.parametrize(
    ("first", "later"), [(1, 1.5), (dt.date(2026, 1, 1), NAIVE), ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1}, {}), (1, "x")]
)
def test_later_rows_have_the_types_of_the_first(first: Any, later: Any) -> None:
    schema = arrow_table([{"v": first}]).schema
    with pytest.raises(ToolError, match="row 12, column v"):
        arrow_table([{"v": first}, {"v": later}], schema, first=10)


async def test_mappings_of_all_rows_together_have_the_same_keys_or_are_text() -> None:
    async def batches() -> Any:
        for value in ({"a": 1}, {"a": None}, {"b": 2}):
            yield [{"v": value, "w": {"a": 1}}]

    schema = await arrow_schema(batches())
    assert [str(kind) for kind in schema.types] == ["string", "struct<a: int64>"]
    assert arrow_table([{"v": {"b": 2}, "w": {"a": 1}}], schema).column("v").to_pylist() == ['{"b":2}']


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("1.10::decimal(20, 4)", "1.1000"),
        ("1234567890123456.7891::decimal(20, 4)", "1234567890123456.7891"),
        ("0.0000000001::decimal(20, 10)", "0.0000000001"),
        ("[1.5::decimal(3, 1)]", ["1.5"]),
        ("7::decimal(20, 0)", 7),
        ("18446744073709551615::hugeint", 2**64 - 1),
        ("3.4::float", 3.4),
        ("'nan'::double", None),
        ("'2026-01-02 03:04:05.123456789'::timestamp_ns", "2026-01-02T03:04:05.123456789"),
        ("'2026-01-02 03:04:05.5'::timestamp", "2026-01-02T03:04:05.500000"),
        ("'2026-01-02 03:04:05+02'::timestamptz", "2026-01-02T01:04:05+00:00"),
        ("'infinity'::timestamp", "infinity"),
        ("'-infinity'::date", "-infinity"),
        ("'infinity'::date", "infinity"),
        ("'9999-12-31'::date", "9999-12-31"),
        ("'0044-03-15 (BC)'::date", "-0043-03-15"),
        ("'0044-03-15 (BC) 12:00:00'::timestamp", "-0043-03-15T12:00:00"),
        ("'24:00:00'::time", "24:00:00"),
        ("'01:02:03.5'::time", "01:02:03.500000"),
        ("'01:02:03+02'::timetz", "01:02:03+02"),
        ("interval '1 month 2 days 00:00:00.5'", "1 month 2 days 00:00:00.5"),
        ("[interval '1 month']", ["1 mon"]),
        ("map([1, 2], ['a', 'b'])", {"1": "a", "2": "b"}),
        ("{'a': 1.5::decimal(2, 1), 'b': [1, null]}", {"a": "1.5", "b": [1, None]}),
        ("'101'::bit", "101"),
        ("'a'::enum('a', 'b')", "a"),
        ("'ab'::blob", "YWI="),
        ("[1, 2]::int[2]", [1, 2]),
        ("union_value(n := 2)", 2),
    ],
)
def test_json_of_columns(sql: str, value: Any) -> None:
    relation = duckdb.connect().sql(f"select x from (values (1, {sql}), (2, null), (3, {sql})) t(i, x) order by i")
    rows = [row["x"] for batch in exported(relation).to_arrow_reader(2048) for row in json_rows(batch)]
    assert rows == [value, None, value]


def test_decimals_as_doubles() -> None:
    table = duckdb.connect().sql("select 1.10::decimal(20, 4) as a, 7::hugeint as b").to_arrow_table()
    assert json_rows(table, Numbers.FLOAT) == [{"a": 1.1, "b": 7}]


@pytest.mark.parametrize("sql", ["170141183460469231731687303715884105727", "'-inf'::float", "['inf'::double]"])
def test_values_without_json_are_named(sql: str) -> None:
    table = duckdb.connect().sql(f"select null as x union all select {sql}").to_arrow_table()
    with pytest.raises(ToolError, match="row 7, column x"):
        json_rows(table, first=5)


def test_infinite_times_leave_duckdb_as_no_number() -> None:
    table = duckdb.connect().sql("select '2026-01-01'::date as a union all select '-infinity'::date").to_arrow_table()
    with pytest.raises(ToolError, match="row 2, column a: an infinite date32"):
        check_times(table, 0)
