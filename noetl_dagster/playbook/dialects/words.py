"""Reads keys, owners, tags, names and cron lines in the form that Dagster accepts."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from itertools import chain
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

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
    """Renders the templates of a value over ``metadata``."""
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
    """Reads a text; returns None if it is missing."""
    value = block.text(*names)
    return None if value is None else str(settled(block, names[0], value))


def checked(block: Block, key: str, wrong: Callable[[str], str | None]) -> str | None:
    """Reads a text, unless ``wrong`` explains why it cannot be used."""
    value = text(block, key)
    reason = None if value is None else wrong(value)
    if reason is not None:
        block.error(f"{key} {value!r} {reason}", key)
    return value if reason is None else None


def name(block: Block, key: str) -> str | None:
    """Reads a name of letters, digits and underscores."""
    only = "may hold letters, digits and underscores only"
    return checked(block, key, lambda value: None if _NAME.match(value) else only)


def group(block: Block, key: str) -> str | None:
    """Reads a group's name; slashes make groups within groups."""
    only = "may hold letters, digits, underscores and slashes between them only"
    return checked(block, key, lambda value: None if _GROUP.match(value) else only)


def timezone_wrong(zone: str) -> str | None:
    """Explains why a text is no time zone."""
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return "is unknown; use a name such as Europe/Berlin or UTC"
    return None


def moment_wrong(text: str) -> str | None:
    """Explains why a text is no day, or moment of it, in another field's time zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return "is no date; write it as 2026-01-31 or 2026-01-31T06:00"
    return None if moment.tzinfo is None else "has an offset; leave it out and say timezone: <name>"


def asset_key(block: Block, key: str) -> Key | None:
    """Reads a key: a list of its parts, or text with slashes."""
    value = settled(block, key, block.take(key))
    if value is None:
        return None
    parts = value if isinstance(value, list) else str(value).strip("/").split("/")
    if isinstance(value, dict) or not parts or not all(_KEY_PART.match(str(part)) for part in parts):
        block.error(f"{key} is an asset's key, 'warehouse/patients' or [warehouse, patients]", key)
        return None
    return tuple(str(part) for part in parts)


def owners(block: Block) -> tuple[str, ...]:
    """Reads owners: ``team:<name>`` or e-mail addresses, as Dagster requires."""
    names = tuple(str(settled(block, "owners", one)) for one in block.names("owners"))
    for one in names:
        if not _TEAM.match(one) and not _EMAIL.match(one):
            message = f"owner {one!r} is neither 'team:<name>' nor an address as 'ana@example.org'"
            block.error(message, "owners")
    return names


def tags(block: Block) -> dict[str, str]:
    """Reads a mapping, or a list of words without values."""
    value = settled(block, "tags", block.take("tags"))
    if isinstance(value, list):
        value = dict.fromkeys(map(str, value), "")
    if value is not None and not isinstance(value, dict):
        message = f"tags must be a mapping (key: value) or a list of words, found {described(value)}"
        block.error(message, "tags")
        return {}
    texts = {}
    for name, item in (value or {}).items():
        text = str(item).lower() if isinstance(item, bool) else "" if item is None else str(item)
        texts[str(name)] = text
        if not _TAG_KEY.match(str(name)) or not _TAG_VALUE.match(text):
            message = "holds letters, digits, '_', '-' and '.', 63 at most, the key also one '/'"
            block.error(f"tag {name}: {text!r}: a tag {message}", "tags")
    return texts


def kinds(block: Block) -> tuple[str, ...]:
    """Reads the kinds of an asset, such as ``parquet``; Dagster shows them as icons."""
    names = tuple(str(settled(block, "kinds", one)).lower() for one in block.names("kinds"))
    for one in names:
        if not _TAG_VALUE.match(one) or not one:
            block.error(f"kind {one!r} may hold letters, digits, '_', '-' and '.' only", "kinds")
    return names


# Ours: croniter is one more dependency for a question of ten lines, and Dagster's own copy takes its import.
_WORDS = frozenset({"@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually"})
_BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_NAMES = {
    3: ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    4: ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
_PART = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d+))?")
_DAY, _MONTH = 2, 3
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Days of each month, February in a leap year."""


def cron_wrong(line: str) -> str | None:
    """Explains why a line is none that Dagster's schedules take, or that ever comes, as the 31st of February."""
    values = _values(line)
    if values is None:
        is_word = line.strip().lower() in _WORDS
        return None if is_word else "is no cron line: minute hour day month weekday"
    if any(min(values[_DAY]) <= _LONGEST[month - 1] for month in values[_MONTH]):
        return None
    return "never comes: none of its months has such a day; L is the last day of a month"


def _values(line: str) -> list[list[int]] | None:
    """Returns the values of each field of a cron line; None if one of them is wrong."""
    fields = line.lower().split()
    if len(fields) != len(_BOUNDS):
        return None
    values = [[_part(number, part) for part in field.split(",")] for number, field in enumerate(fields)]
    return None if any([] in parts for parts in values) else [list(chain(*parts)) for parts in values]


def _part(number: int, text: str) -> list[int]:
    """Expands a part of a field: ``22-2`` wraps around the end, ``5/10`` runs to it; none if it is wrong."""
    if (number, text) == (_DAY, "l"):
        return [28]  # the last day of a month is at least this one
    match = _PART.fullmatch(text)
    step = 0 if match is None else int(match[3] or 1)
    if match is None or step == 0:
        return []
    low, high = _BOUNDS[number]
    start = low if match[1] is None else _number(number, match[1])
    end = _number(number, match[2]) if match[2] is not None else start if match[1] and not match[3] else high
    if not low <= start <= high or not low <= end <= high:
        return []
    upward = range(start, end + 1) if start <= end else (*range(start, high + 1), *range(low, end + 1))
    return list(upward)[::step]


def _number(number: int, text: str) -> int:
    names = _NAMES.get(number, [])
    if text in names:
        return names.index(text) + _BOUNDS[number][0]
    return int(text) if text.isascii() and text.isdigit() else -1
