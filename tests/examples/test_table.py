"""The table of examples lists every folder."""

from __future__ import annotations

import re

from tests.conftest import PROJECT

EXAMPLES = PROJECT / "examples"


def test_the_table_lists_exactly_the_folders() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)/README\.md\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert all(name == folder for name, folder in rows)
    assert sorted(name for name, _ in rows) == sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
