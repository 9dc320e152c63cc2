"""What parallel iterations wrote to ctx, put together."""

from __future__ import annotations

from noetl_dagster.engine.loops.gather import merge_patches


def test_equal_values_stand() -> None:
    patches = [(0, ["unit"], "mm"), (1, ["unit"], "mm")]
    assert merge_patches(patches, {}) == ({("unit",): "mm"}, [])


def test_of_different_values_the_last_item_wins() -> None:
    patches = [(0, ["a", "b"], 1), (1, ["a", "b"], 2), (1, ["c"], 3)]
    assert merge_patches(patches, {"a": {"b": 0}}) == ({("a", "b"): 2, ("c",): 3}, ["a.b"])


def test_lists_that_grew_from_the_one_that_was_read_are_put_together() -> None:
    patches = [(0, ["seen"], ["x", 1]), (2, ["seen"], ["x", 2, 3]), (3, ["seen"], ["x"])]
    assert merge_patches(patches, {"seen": ["x"]}) == ({("seen",): ["x", 1, 2, 3]}, [])


def test_a_list_that_did_not_grow_from_it_is_a_conflict() -> None:
    patches = [(0, ["seen"], ["x", 1]), (1, ["seen"], [2])]
    assert merge_patches(patches, {"seen": ["x"]}) == ({("seen",): [2]}, ["seen"])


def test_the_last_write_of_one_item_counts() -> None:
    patches = [(0, ["page"], 1), (0, ["page"], 2), (1, ["page"], 2)]
    assert merge_patches(patches, {"page": 0}) == ({("page",): 2}, [])
