"""Describes values and suggests names in messages about playbooks."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

_SHOWN = 20
Hints = Callable[[str], str]
"""Suggests the nearest name for an unknown one, or lists the known ones."""


def described(value: Any) -> str:
    """Describes a value's kind in YAML's words, for messages."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {str(value).lower()}"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"the text {value[:40]!r}"
    return f"{value!r:.80}"


def is_template(value: str) -> bool:
    """Reports whether a text contains template syntax."""
    return "{{" in value or "{%" in value


def is_open(value: Any) -> bool:
    """Reports whether a value is missing, or a template that is rendered when the task runs."""
    return value is None or (isinstance(value, str) and is_template(value))


def suggestion(key: str, names: tuple[str, ...], what: str = "known keys") -> str:
    """Returns 'did you mean x?' for a near miss, else the list of what is known."""
    return did_you_mean(key, names) or f"{what}: {listed(names)}"


def hints_against(names: tuple[str, ...], what: str, *, budget: int = 50) -> Hints:
    """Makes suggestions against a long list of names; only so many are looked up, for each reads the whole list."""

    @cache
    def hint(name: str) -> str:
        return suggestion(name, names if hint.cache_info().currsize < budget else (), what)

    return hint


@lru_cache(maxsize=512)  # an error in a loop asks the same again and again, and each answer reads all names
def did_you_mean(name: str, names: tuple[str, ...]) -> str:
    """Returns 'did you mean x?' for a near miss, else nothing."""
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else ""


def listed(names: tuple[str, ...], most: int = _SHOWN) -> str:
    """Formats 'a, b, c and 5 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
