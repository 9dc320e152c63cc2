"""Documents that are made from the code agree with it."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.cli.documents import settings_page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_settings_page_lists_every_setting() -> None:
    written = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert written == settings_page(), "run: noetl-dagster settings --markdown > docs/settings.md"
