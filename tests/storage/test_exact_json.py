"""JSON numbers: those that a double or 64-bit integer holds arrive equal, others are refused, or become text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact

HELD = [
    ("18446744073709551615", 2**64 - 1),
    ("-9223372036854775808", -(2**63)),
    ("1.1000000000000000000000", 1.1),
    ("0.10000000000000001", 0.1),
    ("0.1000000000000000055511151231257827", 0.1),
    ("0.00000000000000000000", 0.0),
    ("1e300", 1e300),
    ("1e-320", 1e-320),
    ("100000000000000000000.0", 1e20),
    ("-100000000000000000000", -1e20),
]
CHANGED = [
    ("123456789012345678901234567890", 1.2345678901234568e29),
    ("18446744073709551616", 1.8446744073709552e19),
    ("-9223372036854775809", -9.223372036854776e18),
    ("1234567890123456.7891", 1234567890123456.8),
    ("12345678901234.567", 12345678901234.566),
    ("123456789012345678e-2", 1234567890123456.8),
    ("1e-400", 0.0),
]


@pytest.mark.parametrize(("literal", "value"), HELD)
@pytest.mark.parametrize("numbers", Numbers)
def test_a_number_that_is_held_arrives(literal: str, value: Any, numbers: Numbers) -> None:
    text = f'{{"text": "{literal}", "rows": [{{"n": {literal} }}]}}'
    arrived = loads_exact(text, numbers)
    assert arrived == {"text": literal, "rows": [{"n": value}]}
    assert type(arrived["rows"][0]["n"]) is type(value)


@pytest.mark.parametrize(("literal", "nearest"), CHANGED)
def test_a_number_that_would_change_is_refused_unless_a_word_allows_it(literal: str, nearest: float) -> None:
    text = f'{{"text": ", {literal}", "rows": [{{"n": 1}}, {{"n": {literal}}}]}}'.encode()
    with pytest.raises(InexactNumberError) as refused:
        loads_exact(text)
    assert str(refused.value).startswith(
        f"value.rows[1].n is {literal}, which neither a 64-bit integer nor a double holds;"
    )
    assert loads_exact(text, Numbers.FLOAT)["rows"][1]["n"] == nearest
    assert loads_exact(text, Numbers.TEXT) == {"text": f", {literal}", "rows": [{"n": 1}, {"n": literal}]}


def test_no_double_is_infinity() -> None:
    for numbers in (Numbers.EXACT, Numbers.FLOAT):
        with pytest.raises(InexactNumberError, match="value is 1e400"):
            loads_exact("1e400", numbers)
    assert loads_exact("[1e400, NaN]", Numbers.TEXT) == ["1e400", "NaN"]


@pytest.mark.parametrize("text", ["", "[", "NaN", '{"a": 1} {"a": 2}', '"\\ud800"', "[" * 5000])
def test_what_is_not_json_stays_an_error_of_json(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads_exact(text)
