"""The README and the start page show what happens."""

from __future__ import annotations

from pathlib import Path

from tests.pages.console import Reader

PROJECT = Path(__file__).parents[2]


def test_squares_of_the_readme(reader: Reader, tmp_path: Path) -> None:
    page, _, checkout = (PROJECT / "README.md").read_text(encoding="utf-8").partition("## From a checkout")
    assert checkout, "what follows installs this project"
    start = tmp_path / "README.md"
    start.write_text(page, encoding="utf-8")
    assert reader.follow(start) == 1
