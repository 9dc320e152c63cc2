"""Documents that are made from the code agree with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import noetl_dagster
from noetl_dagster.errors import ProblemKind
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.loader import parse_report
from tests.forked import run

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"


def test_the_pages_agree_with_the_code(tmp_path: Path) -> None:
    pages = "import runpy, sys; sys.path[0] = sys.argv[1]; runpy.run_module('pages', run_name='__main__')"
    done = run("-c", pages, str(PROJECT / "scripts"), "--check", environment=os.environ, folder=PROJECT, texts=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_page_has_every_public_name() -> None:
    written = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    for name in noetl_dagster.__all__:
        assert f"### {name}\n" in written


def test_the_page_of_events_has_every_type() -> None:
    page = (DOCS / "reference" / "events.md").read_text(encoding="utf-8").partition("## Columns")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == sorted(EventType)


def test_public_names_are_what_the_package_says() -> None:
    assert sorted(noetl_dagster.__all__) == noetl_dagster.__all__
    for name in noetl_dagster.__all__:
        assert getattr(noetl_dagster, name).__name__ == name
    assert set(noetl_dagster.__all__) <= set(dir(noetl_dagster))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        noetl_dagster.nothing  # noqa: B018


def test_the_package_itself_loads_nothing() -> None:
    loaded = "import sys, noetl_dagster; print([m for m in sys.modules if m.startswith(('dagster', 'pyspark'))])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["tutorial", "how-to", "reference", "explanation"])
def test_the_playbooks_of_the_pages_load(folder: str) -> None:
    """A fragment of a playbook is in a block ``text``; other YAML has a title."""
    blocks = [
        (page.name, block)
        for page in sorted((DOCS / folder).rglob("*.md"))
        for block in re.findall(r"^ *```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    ]
    for page, block in blocks:
        playbook, problems = parse_report(textwrap.dedent(block), file=page)
        assert playbook is not None, problems
        # kinds may need extras that the tests do not install
        assert not [problem for problem in problems if problem.kind is not ProblemKind.MISSING_EXTRA]
