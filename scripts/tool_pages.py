"""Tables of the tools' fields in their pages, between ``<!-- fields: KIND -->`` and ``<!-- /fields -->``."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from page_text import cell, code, table

from noetl_dagster.playbook.tool_kinds import TOOL_KINDS

PROJECT = Path(__file__).parents[1]
_MARKED = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- /fields -->)", re.DOTALL)


def tool_pages() -> dict[str, partial[str]]:
    """Returns the pages with marks by name, and what makes each of them."""
    pages = (PROJECT / "docs").rglob("*.md")
    marked = [page for page in sorted(pages) if _MARKED.search(page.read_text(encoding="utf-8"))]
    return {str(page.relative_to(PROJECT)): partial(_page, page) for page in marked}


def _page(path: Path) -> str:
    return _MARKED.sub(
        lambda found: "\n".join([found[1], *_fields(found[2]), found[3]]), path.read_text(encoding="utf-8")
    )


def _fields(kind: str) -> list[str]:
    fields = TOOL_KINDS[kind]
    rows = (
        (code(name), ", ".join(map(code, fields.spellings[name][1:])), cell(meaning))
        for name, meaning in fields.meanings.items()
    )
    return table(("field", "other spellings", "meaning"), rows)
