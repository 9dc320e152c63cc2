"""Reads keys, owners, tags, names and cron lines in the form that Dagster accepts."""

from __future__ import annotations

import re
from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.assets import Key
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.wording import described

_NAME = re.compile(r"^[A-Za-z0-9_]+$")
_GROUP = re.compile(r"^[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*$")
_TEAM = re.compile(r"^team:[A-Za-z0-9_-]+$")
_EMAIL = re.compile(r"^[^@\s]+@[^@\s]+\.[^@\s]+$")
_TAG_KEY = re.compile(r"^([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}$")
_TAG_VALUE = re.compile(r"^[A-Za-z0-9_.-]{0,63}$")
_KEY_PART = re.compile(r"^[^\"*\[\],]+$")


def settled(block: Block, key: str, value: Any) -> Any:
    """A value whose templates are rendered over ``metadata``."""
    if isinstance(value, dict):
        return {settled(block, key, name): settled(block, key, item) for name, item in value.items()}
    if isinstance(value, list):
        return [settled(block, key, item) for item in value]
    if not isinstance(value, str) or "{{" not in value:
        return value
    try:
        return compile_value(value).render({"metadata": block.reading.metadata})
    except TemplateError as error:
        block.error(f"{key} may use metadata only: {error}", key)
        return ""


def text(block: Block, *names: str) -> str | None:
    """A text, None when missing."""
    found = block.text(*names)
    return None if found is None else str(settled(block, names[0], found))


def name(block: Block, key: str) -> str | None:
    """A name of letters, digits and underscores."""
    found = text(block, key)
    if found is None or _NAME.match(found):
        return found
    block.error(f"{key} {found!r} may hold letters, digits and underscores only", key)
    return None


def group(block: Block, key: str) -> str | None:
    """A group's name; slashes make groups within groups."""
    found = text(block, key)
    if found is None or _GROUP.match(found):
        return found
    block.error(f"{key} {found!r} may hold letters, digits, underscores and slashes between them only", key)
    return None


def asset_key(block: Block, key: str) -> Key | None:
    """A key: a list of its parts, or text with slashes."""
    value = settled(block, key, block.take(key))
    if value is None:
        return None
    parts = value if isinstance(value, list) else str(value).strip("/").split("/")
    if isinstance(value, dict) or not parts or not all(_KEY_PART.match(str(part)) for part in parts):
        block.error(f"{key} is an asset's key, 'warehouse/patients' or [warehouse, patients]", key)
        return None
    return tuple(str(part) for part in parts)


def owners(block: Block, key: str = "owners") -> tuple[str, ...]:
    """``team:<name>`` or addresses of e-mail, which is what Dagster takes."""
    found = tuple(str(settled(block, key, one)) for one in block.names(key))
    for one in found:
        if not _TEAM.match(one) and not _EMAIL.match(one):
            block.error(f"owner {one!r} is neither 'team:<name>' nor an address as 'ana@example.org'", key)
    return found


def tags(block: Block, key: str = "tags") -> dict[str, str]:
    """A mapping, or a list of words that stand for themselves."""
    value = settled(block, key, block.take(key))
    if value is None:
        return {}
    if isinstance(value, list):
        value = dict.fromkeys(map(str, value), "")
    if not isinstance(value, dict):
        block.error(f"{key} must be a mapping (key: value) or a list of words, found {described(value)}", key)
        return {}
    found = {str(one): "" if item is None else _plain(item) for one, item in value.items()}
    for one, item in found.items():
        if not _TAG_KEY.match(one) or not _TAG_VALUE.match(item):
            message = "holds letters, digits, '_', '-' and '.', 63 at most, the key also one '/'"
            block.error(f"tag {one}: {item!r}: a tag {message}", key)
    return found


def kinds(block: Block, key: str = "kinds") -> tuple[str, ...]:
    """Reads the kinds of an asset, such as ``parquet``; Dagster shows them as icons."""
    found = tuple(str(settled(block, key, one)).lower() for one in block.names(key))
    for one in found:
        if not _TAG_VALUE.match(one) or not one:
            block.error(f"kind {one!r} may hold letters, digits, '_', '-' and '.' only", key)
    return found


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """Reports whether a line is one that Dagster's schedules take."""
    if line.strip().lower() in _WORDS:
        return True
    fields = line.lower().split()
    return len(fields) == len(_BOUNDS) and all(_is_field(number, text) for number, text in enumerate(fields))


def ever_comes(line: str) -> bool:
    """Reports whether one of a line's months has one of its days: the 31st of February never comes."""
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
    """Expands a part of a field: ``22-2`` wraps around the end, ``5/10`` runs to it."""
    found = _PART.fullmatch(text)
    assert found is not None
    low, high = _BOUNDS[number]
    start = low if found[1] is None else _number(number, found[1])
    end = _number(number, found[2]) if found[2] is not None else start if found[1] and not found[3] else high
    assert start is not None
    assert end is not None
    upward = range(start, end + 1) if start <= end else (*range(start, high + 1), *range(low, end + 1))
    return list(upward)[:: int(found[3] or 1)]
