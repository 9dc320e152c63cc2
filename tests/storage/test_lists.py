"""Lists in JSON: written and read a part at a time, whoever wrote them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from noetl_dagster.errors import FormatError
from noetl_dagster.storage import codec

ROWS = [{"id": n, "name": f"line\nbreak, {n}", "nested": [[n], {"a": None}]} for n in range(30_000)]


@pytest.mark.parametrize(
    "value",
    [ROWS, list(range(400_000)), [[1, 2]] * 120_000, [], [None] * 257, {"rows": ROWS}, ["]", "["] * 150_000],
    ids=["rows", "numbers", "lists", "none", "few", "mapping", "brackets"],
)
def test_a_list_is_json_and_comes_back(value: Any) -> None:
    data = codec.encode(value).data
    assert orjson.loads(data) == value
    assert codec.decode(data, codec.JSON) == value


@pytest.mark.parametrize("indent", [0, orjson.OPT_INDENT_2])
@pytest.mark.parametrize("value", [ROWS, [[1, 2]] * 120_000, [{"a": [1, {"b": 2}]}] * 60_000])
def test_what_others_wrote_in_lines_is_read(value: Any, indent: int) -> None:
    assert codec.decode(orjson.dumps(value, option=indent), codec.JSON) == value
    one_in_a_line = b"[" + b",\n".join(map(orjson.dumps, value)) + b"]"
    assert codec.decode(one_in_a_line, codec.JSON) == value


@pytest.mark.parametrize("tail", [b",\n]", b",\n,\n1]", b"] 1]", b""], ids=repr)
def test_a_broken_list_is_an_error(tail: bytes) -> None:
    data = b"[" + b",\n".join([b"1, 2"] * 300_000) + tail
    with pytest.raises(FormatError, match="no valid application/json"):
        codec.decode(data, codec.JSON)


def test_a_list_that_json_cannot_express_is_an_error() -> None:
    with pytest.raises(TypeError, match="object"):
        codec.encode([*range(1000), object()])
