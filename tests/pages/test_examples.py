"""Every example runs as its README says, in a copy of its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pages.console import Reader

EXAMPLES = Path(__file__).parents[2] / "examples"
MARKS = {"fanout_100k": [pytest.mark.slow]}
"""Examples that take long, or need Spark."""

FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md") if "```console" in path.read_text())


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in FOLDERS])
def test_an_example_prints_what_its_readme_shows(name: str, reader: Reader) -> None:
    shutil.copytree(EXAMPLES / name, reader.folder, dirs_exist_ok=True)
    for path in reader.folder.rglob("*.yaml"):
        path.write_text(reader.here(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert reader.follow(reader.folder / "README.md") > 0
