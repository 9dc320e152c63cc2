"""Whether a line says when: five fields of cron, or a word such as ``@daily``."""

from __future__ import annotations

import re

# Ours: croniter is one more dependency for a question of ten lines, and Dagster's own copy takes its import.
_WORDS = frozenset({"@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually"})
_BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_NAMES = {
    3: ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    4: ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
_PART = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d+))?")
_LAST_DAY = (2, "l")
_DAY, _MONTH = 2, 3
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Days of each month, February in a leap year."""


def is_cron(line: str) -> bool:
    """Whether a line is one that Dagster's schedules take."""
    if line.strip().lower() in _WORDS:
        return True
    fields = line.lower().split()
    return len(fields) == len(_BOUNDS) and all(_is_field(number, text) for number, text in enumerate(fields))


def ever_comes(line: str) -> bool:
    """Whether one of a line's months has one of its days: the 31st of February never comes."""
    fields = line.lower().split()
    if len(fields) != len(_BOUNDS):
        return True
    days = fields[_DAY].split(",")
    if "l" in days:
        return True
    first = min(value for day in days for value in _values(_DAY, day))
    months = {month for part in fields[_MONTH].split(",") for month in _values(_MONTH, part)}
    return any(first <= _LONGEST[month - 1] for month in months)


def _is_field(number: int, text: str) -> bool:
    return all(_is_part(number, part) for part in text.split(","))


def _is_part(number: int, text: str) -> bool:
    """``*``, ``5``, ``mon-fri``, ``*/10``."""
    if (number, text) == _LAST_DAY:
        return True
    found = _PART.fullmatch(text)
    if found is None or found[3] == "0":
        return False
    values = [_number(number, one) for one in found.group(1, 2) if one is not None]
    low, high = _BOUNDS[number]
    return all(value is not None and low <= value <= high for value in values)  # 22-2 goes over midnight


def _number(number: int, text: str) -> int | None:
    names = _NAMES.get(number, [])
    if text in names:
        return names.index(text) + _BOUNDS[number][0]
    return int(text) if text.isascii() and text.isdigit() else None


def _values(number: int, text: str) -> list[int]:
    """What a part of a field stands for: ``22-2`` goes over the end, ``5/10`` goes to it."""
    found = _PART.fullmatch(text)
    assert found is not None
    low, high = _BOUNDS[number]
    start = low if found[1] is None else _number(number, found[1])
    end = _number(number, found[2]) if found[2] is not None else start if found[1] and not found[3] else high
    assert start is not None
    assert end is not None
    upward = range(start, end + 1) if start <= end else (*range(start, high + 1), *range(low, end + 1))
    return list(upward)[:: int(found[3] or 1)]
