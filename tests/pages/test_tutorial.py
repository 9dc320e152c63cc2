"""The tutorial works as it is written: its pages, one after another, in one folder."""

from __future__ import annotations

from pathlib import Path

from tests.pages.console import Reader

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"


def test_the_tutorial(reader: Reader) -> None:
    pages = sorted(TUTORIAL.glob("[0-9]*.md"))
    assert pages
    for page in pages:
        reader.follow(page)
