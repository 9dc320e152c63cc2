"""Writes the pages of the documentation that are made from the code; with ``--check``, names those that differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from api_page import api_page
from chart_page import chart_page, chart_schema
from cli_page import cli_page
from http_page import http_page
from rules_page import rules_page
from settings_page import settings_page
from tool_pages import tool_pages

PROJECT = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/http-api.md": http_page,
    "docs/reference/python-api.md": api_page,
    "docs/reference/settings.md": settings_page,
    "docs/reference/verification.md": rules_page,
    **tool_pages(),
    "helm/noetl-dagster/values.schema.json": chart_schema,
    "docs/reference/chart-values.md": chart_page,
}
"""In order: the page of the chart reads its schema."""


def main(*, check: bool) -> int:
    """Writes the pages, or only compares them; returns the exit code."""
    differing = []
    for name, made in PAGES.items():
        path, text = PROJECT / name, made()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    for name in differing:
        print(f"{name} differs from the code; run: make docs" if check else f"wrote {name}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
