"""Files to which playbooks write a line for every item that begins: the item, and perhaps the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path


def lines(ledger: Path) -> list[tuple[int, ...]]:
    """The numbers of each line, in the order in which the items began."""
    return [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]


def assert_only_unfinished_ran_again(ledger: Path, items: int, finished: Collection[int]) -> None:
    """After a process was killed when ``finished`` were done: every item ran, and none of those twice."""
    counts = Counter(item for item, *_ in lines(ledger))
    assert set(counts) == set(range(items)), "no item is lost"
    twice = {item for item, count in counts.items() if count > 1}
    assert not twice & set(finished), "no finished item ran again"
