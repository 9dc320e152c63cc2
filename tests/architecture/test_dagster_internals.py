"""Every private name of Dagster is where we import it from; an error says what to do when it is not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from noetl_dagster import dagster_internals
from noetl_dagster.dagster_internals import INTERNALS, Internal


def test_every_name_is_there() -> None:
    for name in INTERNALS:
        found = getattr(dagster_internals, name)  # fails with its use and what replaces it
        assert getattr(found, "__name__", name) == name  # constants have no name


def test_one_that_moved_says_who_needs_it_and_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Internal("dagster._core.nowhere", "code_location/launch.py: to launch", "the public launcher")
    monkeypatch.setitem(INTERNALS, "Gone", gone)
    monkeypatch.setitem(INTERNALS, "Moved", Internal("dagster._core.errors", "here: this", "that"))
    with pytest.raises(ImportError, match=r"nowhere\.Gone.*code_location/launch.py: to launch.*public launcher"):
        _ = dagster_internals.Gone
    with pytest.raises(ImportError, match=r"dagster\._core\.errors\.Moved.*here: this.*that"):
        _ = dagster_internals.Moved


def test_types_are_checked_against_the_same_modules() -> None:
    tree = ast.parse(Path(dagster_internals.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("dagster._", "dagster_shared."))
        for alias in node.names
    }
    assert typed == {name: internal.module for name, internal in INTERNALS.items()}


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    code = "import sys, noetl_dagster.dagster_internals; sys.exit('dagster' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
