"""Every example runs as its README says, in a copy of its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pages.console import Reader

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md") if "```console" in path.read_text())
FULL = sorted(path.parent.name for path in EXAMPLES.glob("*/FULL.md"))
SLOW = {"dbt_duckdb", "spark_lake"}
"""Examples that install packages or start a JVM."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FOLDERS]
)
def test_an_example_prints_what_its_readme_shows(name: str, reader: Reader) -> None:
    follow(name, "README.md", reader)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_the_full_size_of_an_example(name: str, reader: Reader) -> None:
    follow(name, "FULL.md", reader)


def follow(name: str, page: str, reader: Reader) -> None:
    """Follows a page of an example in a copy of its folder."""
    shutil.copytree(EXAMPLES / name, reader.folder, dirs_exist_ok=True)
    for path in reader.folder.rglob("*.yaml"):
        path.write_text(reader.here(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert reader.follow(reader.folder / page) > 0
