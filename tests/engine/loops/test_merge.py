"""What parallel iterations wrote to ctx, put together."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.loops.gather import merge_patches


@pytest.mark.parametrize(
    ("patches", "ctx", "merged", "conflicts"),
    [
        pytest.param([(0, ["u"], "mm"), (1, ["u"], "mm")], {}, {("u",): "mm"}, [], id="equal values"),
        pytest.param(
            [(0, ["a", "b"], 1), (1, ["a", "b"], 2), (1, ["c"], 3)],
            {"a": {"b": 0}},
            {("a", "b"): 2, ("c",): 3},
            ["a.b"],
            id="of different values the last item's",
        ),
        pytest.param(
            [(0, ["s"], ["x", 1]), (2, ["s"], ["x", 2, 3]), (3, ["s"], ["x"])],
            {"s": ["x"]},
            {("s",): ["x", 1, 2, 3]},
            [],
            id="lists that grew from the one that was read are joined",
        ),
        pytest.param(
            [(0, ["s"], ["x", 1]), (1, ["s"], [2])],
            {"s": ["x"]},
            {("s",): [2]},
            ["s"],
            id="a list that did not grow from it is a conflict",
        ),
        pytest.param(
            [(0, ["p"], 1), (0, ["p"], 2), (1, ["p"], 2)], {"p": 0}, {("p",): 2}, [], id="the last write of an item"
        ),
    ],
)
def test_writes_are_merged(patches: Any, ctx: Any, merged: Any, conflicts: list[str]) -> None:
    assert merge_patches(patches, ctx) == (merged, conflicts)
