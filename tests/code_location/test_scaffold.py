"""Commented starts are right as they are written."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.code_location.scaffold import new_playbook
from noetl_dagster.playbook.loader import parse_report


def test_a_playbook_has_no_mistakes() -> None:
    playbook, problems = parse_report(new_playbook("cubes", path="lab/cubes"), code=True)
    assert problems == []
    assert playbook is not None
    assert (playbook.name, playbook.asset_key("total")) == ("cubes", ("lab", "cubes", "total"))


def test_templates_are_in_the_package() -> None:
    import noetl_dagster.code_location

    assert (Path(noetl_dagster.code_location.__file__).parent / "templates" / "playbook.yaml").is_file()
