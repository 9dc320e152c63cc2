"""Documents that are made from the code agree with it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from noetl_dagster.cli.commands.documents import settings_page
from noetl_dagster.playbook.loader import parse_report

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"


def test_the_settings_page_lists_every_setting() -> None:
    written = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert written == settings_page(), "run: noetl-dagster settings --markdown > docs/settings.md"


@pytest.mark.parametrize("page", ["README.md", "docs/language.md"])
def test_the_playbooks_of_a_page_load(page: str) -> None:
    text = (PROJECT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```yaml\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        playbook, problems = parse_report(textwrap.dedent(block), file=page)
        assert playbook is not None, problems
        assert not problems
