"""Which value of a source goes furthest."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.batches import batches_of
from noetl_dagster.tools.rows.watermarks import Value, greatest, greatest_of_batches, rank

IN_ORDER: tuple[tuple[Value, ...], ...] = (
    (-7, -1.5, 0, 0.25, 1, 2**53, 2**53 + 1),
    (
        "2025-12-31",
        "2026-01-01T00:30:00+01:00",
        "2025-12-31T23:30:00.5",
        "2026-01-01",
        "2026-01-01T00:00:00.000000001Z",
        "2026-01-01 00:00:00.1",
        "2025-12-31T16:00:01-08",
        "2026-01-01T00:01",
    ),
    ("", "A", "a10", "a9", "b", "é"),
)


@pytest.mark.parametrize("values", IN_ORDER)
def test_the_greatest(values: tuple[Value, ...]) -> None:
    ranks: list[Any] = [rank(value) for value in values]
    assert sorted(ranks) == ranks
    for value in values[1:]:
        before = values[: values.index(value) + 1]
        assert greatest(before, "s") == greatest(reversed(before), "s") == value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-01-01", "2026-01-01T00:00:00Z"),
        ("2026-01-01T01:00:00+0100", "2026-01-01T00:00:00.000"),
        ("2026-01-01T00:00:00.5Z", "2026-01-01T00:00:00.500"),
    ],
)
def test_one_moment_in_two_ways(one: str, other: str) -> None:
    assert rank(one) == rank(other)
    assert greatest([one, other], "s") == one


@pytest.mark.parametrize("text", ["2026-13-01", "20260101", "2026-01-01T25:00", "0001-01-01T00:00+05:00", "2026"])
def test_what_is_no_time_is_a_text(text: str) -> None:
    assert rank(text) == text


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"rows": [{"at": {"n": 1}}, {"at": {"n": 3}}, {"at": {"n": None}}, {}]}, 3),
        ({"rows": []}, None),
        ([{"at": {"n": None}}], None),
        ([{"at": {"n": Decimal("1.5")}}, {"at": {"n": float("nan")}}], "1.5"),
        ([{"at": {"n": datetime(2026, 1, 1, tzinfo=UTC)}}], "2026-01-01T00:00:00+00:00"),
        ([{"at": {"n": date(2026, 1, 2)}}, {"at": {"n": date(2026, 1, 1)}}], "2026-01-02"),
        (None, None),
    ],
)
async def test_a_column(result: Any, found: Value | None) -> None:
    assert await greatest_of_batches(batches_of(result), "at.n", "s") == found


def test_decimals_as_text_are_compared_if_both_orders_are_the_same() -> None:
    assert greatest(["1.5", "2.25"], "s") == "2.25"
    with pytest.raises(ToolError, match=r"'10.00' and '9.00' are numbers as text.*::bigint"):
        greatest(["9.00", "10.00"], "s")


async def test_a_column_of_a_table() -> None:
    times = pd.to_datetime(pd.Series(["2026-01-02", None, "2026-01-01"]))
    table = batches_of(pd.DataFrame({"at": times}))
    assert await greatest_of_batches(table, "at", "s") == "2026-01-02T00:00:00"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ([{"n": 1}, {"n": "x"}], "step s: 'x' and 1 cannot be compared"),
        ([{"n": True}], "step s: state.key gives True; a watermark is a number, a time or a text"),
        ([{"n": [1]}], r"state.key gives \[1\]"),
        ([{"n": object()}], "which has no stored form"),
        ([{"m": 1, "o": 2}], "no row of the result has the column 'n' of state.key; columns: m, o"),
    ],
)
async def test_what_is_none(result: Any, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        await greatest_of_batches(batches_of(result), "n", "s")


@pytest.mark.parametrize(
    "rows",
    [[], [{"id": 3}, {}], [{"id": 2}, {"id": 9.5}, {"id": None}], [{"x": 1}], [{"id": 1}, {"id": "a"}]],
)
async def test_rows_some_at_a_time_go_as_far_as_all_together(rows: list[Any]) -> None:
    async def batches() -> Any:
        for row in rows:
            yield [row]

    try:
        whole: Any = await greatest_of_batches(batches_of(rows), "id", "s")
    except ToolError as error:
        with pytest.raises(ToolError, match=re.escape(str(error))):
            await greatest_of_batches(batches(), "id", "s")
    else:
        assert await greatest_of_batches(batches(), "id", "s") == whole
