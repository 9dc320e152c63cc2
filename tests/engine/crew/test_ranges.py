"""Ranges: everything is handed out once, in smaller pieces towards the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.engine.crew.ranges import LARGEST, Range, Ranges


@given(st.integers(0, 5_000), st.integers(0, 3_000), st.lists(st.integers(1, 9), min_size=1))
def test_each_item_is_handed_out_once(start: int, count: int, sharers: list[int]) -> None:
    ranges = Ranges(start, start + count)
    taken: list[int] = []
    turn = 0
    while (found := ranges.take(sharers[turn % len(sharers)])) is not None:
        assert 0 < len(found) <= LARGEST
        taken.extend(range(found.start, found.stop))
        turn += 1

    assert taken == list(range(start, start + count))


def test_pieces_become_smaller_so_that_all_end_together() -> None:
    ranges = Ranges(0, 1_000)
    sizes = []
    while (found := ranges.take(2)) is not None:
        sizes.append(len(found))

    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (250, 1)


def test_what_comes_back_is_marked() -> None:
    ranges = Ranges(0, 10)
    first = ranges.take(1)
    assert first == Range(0, 10)

    ranges.give_back([Range(3, 7)])

    assert len(ranges) == 4
    assert ranges.take(1) == Range(3, 7, again=True)
