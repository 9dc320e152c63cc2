"""A new project: a playbook, the Definitions that load it, and a test that runs it."""

from __future__ import annotations

import re
from pathlib import Path

from noetl_dagster.code_location.scaffold.playbook import TEMPLATES, filled, new_playbook
from noetl_dagster.errors import NoetlError

_PROJECT = TEMPLATES / "project"


class ProjectExistsError(NoetlError):
    """There is something already where a project was to be made."""


def new_project(folder: Path, version: str) -> list[Path]:
    """Writes a project that works, named after its folder.

    Args:
        version: of this package, which the project needs at least.

    Returns:
        The files, as they were written.

    Raises:
        ProjectExistsError: one of them is there already; nothing was written.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", folder.resolve().name.lower()).strip("-") or "playbooks"
    package = re.sub(r"^(?=\d)", "p_", name.replace("-", "_"))
    texts = {
        "README.md": _text("README.md", name=name, package=package),
        "pyproject.toml": _text("pyproject.toml", name=name, package=package, version=version),
        "workspace.yaml": _text("workspace.yaml", package=package),
        ".gitignore": _text("gitignore"),
        f"{package}/__init__.py": "",
        f"{package}/definitions.py": _text("definitions.py"),
        "playbooks/squares.yaml": new_playbook("squares", path=f"{name}/squares"),
        "conftest.py": _text("conftest.py"),
        "tests/test_playbooks.py": _text("test_playbooks.py"),
    }
    files = {folder / path: text for path, text in texts.items()}
    there = [str(path) for path in files if path.exists()]
    if there:
        raise ProjectExistsError(f"{', '.join(there)} is there already; give a folder without")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _text(template: str, **names: str) -> str:
    return filled(_PROJECT / f"{template}.tmpl", **names)
