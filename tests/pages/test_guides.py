"""The guides work as they are written, and their code agrees with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests import forked
from tests.pages.console import Reader, Shown, shown

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("credentials", 6),
        ("embed", 5),
        ("errors", 3),
        ("exactly-once", 2),
        ("install", 1),
        ("local-development", 3),
        ("pagination", 3),
        pytest.param("spark", 1, marks=[pytest.mark.spark, pytest.mark.slow]),
        ("streams", 1),
        ("transfers", 1),
        ("watch-executions", 6),
        ("workers", 2),
    ],
)
def test_a_guide_prints_what_it_shows(name: str, commands: int, reader: Reader) -> None:
    assert reader.follow(GUIDES / f"{name}.md") == commands


def test_the_tool_of_the_guide(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    page = GUIDES / "write-a-tool.md"
    [project] = (
        tomllib.loads(part.text)
        for part in shown(page.read_text("utf-8"))
        if isinstance(part, Shown) and part.name == "pyproject.toml"
    )
    [(group, entries)] = project["project"]["entry-points"].items()
    points = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    installed = reader.folder / "acme_tools-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("\n".join(points))
    reader.environment["PYTHONPATH"] = str(reader.folder)
    monkeypatch.setattr(forked, "MAINS", {})  # a forked program has the packages of the tests only

    assert reader.follow(page) == 2
