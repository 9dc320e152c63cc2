"""SQL as it stands in a playbook, made readable without running it: what its templates leave open is marked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.environment import sql_identifier

MARK = "noetl_value"
"""Stands for a template whose value is known only where the SQL runs; nothing is said of a name that has it."""

_TEMPLATE = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_NAME = re.compile(r"(?:workload\.)?([A-Za-z_]\w*)(\s*\|\s*sql_identifier)?")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*){0,2}")
_PART = re.compile(r'"((?:[^"]|"")+)"|`([^`]+)`|([^".`]+)')


def settled_text(text: Any, known: Mapping[str, Any]) -> str | None:
    """The text with templates of known names filled in where they are identifiers, and :data:`MARK` in place of others.

    Args:
        known: the workload, without what other names hide.

    Returns:
        None for what is no text, and where blocks of the template language decide what the text says.
    """
    if not isinstance(text, str):
        return None
    if "{" not in text:
        return text
    if "{%" in text:
        return None

    def settled(match: re.Match[str]) -> str:
        name = _NAME.fullmatch(match[1])
        value = known.get(name[1]) if name is not None else None
        if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
            return MARK
        try:
            return sql_identifier(value) if name is not None and name[2] else value
        except TemplateError:
            return MARK

    return _TEMPLATE.sub(settled, _COMMENT.sub("", text))


def folded(name: str, kind: str) -> str:
    """A table's name as its database compares it: PostgreSQL keeps the case of what is quoted, others of nothing."""
    parts = []
    for match in _PART.finditer(name):
        quoted = match[1].replace('""', '"') if match[1] is not None else None
        if quoted is not None and kind == "postgres":
            parts.append(quoted)
        else:
            parts.append((quoted or match[2] or match[3]).strip().lower())
    return ".".join(parts)
