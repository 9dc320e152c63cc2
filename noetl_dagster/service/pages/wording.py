"""Text of playbooks, results and workers as pages show it: no character is hidden, and no text is too long."""

from __future__ import annotations

import re
import unicodedata

ELLIPSIS = "\u2026"

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters without a shape, without tab and line feed. Some change the order of others."""


def visible(text: str) -> str:
    """Returns a text whose characters can all be seen: ``⟨U+202E⟩`` stands for the one that turns text around."""
    return _HIDDEN.sub(lambda hidden: f"⟨U+{ord(hidden[0]):04X}⟩", text)


def cells(text: str) -> int:
    """Returns the width of a text in monospaced characters; wide characters count twice."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


def shortened(text: str, most: int) -> str:
    """Returns a visible text of at most so many cells, with an ellipsis at the end if it is longer."""
    text = visible(text[: most + 1])
    if cells(text) <= most:
        return text
    while cells(text) >= most:
        text = text[:-1]
    return text + ELLIPSIS


def counted(number: int, noun: str) -> str:
    """Formats ``1 visit`` and ``1,200 visits``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compact(number: int) -> str:
    """Formats a count in at most six characters: ``99,999``, ``100k``, ``1.2M``."""
    for size, unit in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number // (size // 10) / 10:g}{unit}"
    return f"{number // 1000}k" if number >= 100_000 else f"{number:,}"
