"""What the pages of the reference share: tables, and docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_CODE_BLOCK = ".. code-block::"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table and an empty line; nothing for a table without rows."""
    lines = ["".join(f"| {text} " if text else "| " for text in row) + "|" for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines, ""] if lines else []


def cell(text: str | None) -> str:
    """Returns a text for a cell of a table; what is in angle brackets is no HTML."""
    return re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", one_line(text)).replace("|", "&#124;")


def code(text: object) -> str:
    """Returns a text as code for a cell of a table; nothing for None and empty values."""
    if isinstance(text, bool):
        text = str(text).lower()
    if text is None or text in ("", {}, [], ()):
        return ""
    return f"`{text}`" if "|" not in str(text) else f"<code>{str(text).replace('|', '&#124;')}</code>"


def one_line(text: str | None) -> str:
    """Returns a docstring, or a part of one, as one line."""
    return " ".join(markdown(text or "").split())


def markdown(text: str) -> str:
    """Returns a docstring as Markdown."""
    prose, marker, block = text.partition(_CODE_BLOCK)
    prose = _ROLE.sub(lambda found: f"`{found[1]}`", prose.replace("``", "`"))
    return prose if not marker else "\n".join([prose, *fenced(marker + block)])


def fenced(text: str) -> list[str]:
    """Returns the lines of a code block; YAML without a title would be a playbook."""
    language = 'yaml title="Configuration"' if f"{_CODE_BLOCK} yaml" in text else "python"
    body = [line for line in text.splitlines() if _CODE_BLOCK not in line]
    return [f"```{language}", inspect.cleandoc("\n".join(body)).strip(), "```", ""]


def page(*parts: str | Iterable[str]) -> str:
    """Joins lines, and texts of several lines, to a page."""
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
