"""What is left of a loop's items, handed out in ranges."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LARGEST = 500
"""Items of one range, at most."""


@dataclass(frozen=True, slots=True)
class Range:
    """Items ``start <= index < stop``. ``again``: a helper that is gone had them, and may have ended some."""

    start: int
    stop: int
    again: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


class Ranges:
    """Hands out items in order. The less is left, the smaller a range, so that all end at about the same time."""

    def __init__(self, start: int, stop: int) -> None:
        self._left: deque[Range] = deque([Range(start, stop)] if stop > start else [])

    def __len__(self) -> int:
        return sum(map(len, self._left))

    def take(self, sharers: int) -> Range | None:
        """The next range for one of so many processes; None when nothing is left."""
        if not self._left:
            return None
        size = LARGEST if sharers == 1 else min(LARGEST, max(1, len(self) // (2 * sharers)))
        first = self._left.popleft()
        if len(first) > size:
            self._left.appendleft(Range(first.start + size, first.stop, first.again))
            first = Range(first.start, first.start + size, first.again)
        return first

    def give_back(self, ranges: list[Range]) -> None:
        """Ranges whose taker is gone."""
        self._left.extend(Range(one.start, one.stop, again=True) for one in ranges)

    def clear(self) -> None:
        self._left.clear()
