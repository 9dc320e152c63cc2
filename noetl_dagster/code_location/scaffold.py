"""Commented templates: a project that works, and a playbook."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from noetl_dagster.errors import NoetlError
from noetl_dagster.extras import shipped_folder

TEMPLATES = files("noetl_dagster.code_location") / "templates"
OUTWARD_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
"""A link of an example to this project's documentation, which a copy of the example does not have."""


def new_playbook(name: str, *, path: str, file: str | None = None) -> str:
    """Returns the text of a playbook of two steps, which runs as it is.

    Args:
        name: of its job.
        path: ``metadata.path``, the first parts of its assets' keys.
        file: that will contain it; default: ``playbooks/<name>.yaml``.
    """
    return _filled("playbook.yaml", name=name, path=path, file=file or f"playbooks/{name}.yaml")


def _filled(template: str, **names: str) -> str:
    """Returns a template of this package with its ``$names`` filled in."""
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(names)


def new_project(folder: Path, version: str) -> list[Path]:
    """Writes a project that works, named after its folder.

    Args:
        version: of this package, which the project needs at least.

    Returns:
        The files, as they were written.

    Raises:
        NoetlError: one of them is there already; nothing was written.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", folder.resolve().name.lower()).strip("-") or "playbooks"
    package = re.sub(r"^(?=\d)", "p_", name.replace("-", "_"))

    def text(template: str, **names: str) -> str:
        return _filled(f"project/{template}.tmpl", **names)

    texts = {
        "README.md": text("README.md", name=name, package=package),
        "pyproject.toml": text("pyproject.toml", name=name, package=package, version=version),
        "workspace.yaml": text("workspace.yaml", package=package),
        ".gitignore": text("gitignore"),
        f"{package}/__init__.py": "",
        f"{package}/definitions.py": text("definitions.py"),
        "playbooks/squares.yaml": new_playbook("squares", path=f"{name}/squares"),
        "conftest.py": text("conftest.py"),
        "tests/test_playbooks.py": text("test_playbooks.py"),
    }
    return _write(folder, texts)


def examples() -> dict[str, str]:
    """Returns the examples of this package by name, each with the title of its README."""
    readmes = sorted(shipped_folder("examples").glob("*/README.md"))
    return {path.parent.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in readmes}


def copy_example(folder: Path, example: str) -> list[Path]:
    """Copies an example into a folder, and returns the files.

    Raises:
        NoetlError: there is no such example, and the message lists them; or a file is there already, and nothing was
            written.
    """
    titles = examples()
    if example not in titles:
        listed = "".join(f"\n  {name:20} {title}" for name, title in titles.items())
        raise NoetlError(f"there is no example {example!r}; the examples are{listed}")
    source = shipped_folder("examples") / example
    paths = sorted(path for path in source.rglob("*") if path.is_file() and not _is_made(path.relative_to(source)))
    contents: dict[str, str | bytes] = {str(path.relative_to(source)): path.read_bytes() for path in paths}
    contents["README.md"] = OUTWARD_LINK.sub(r"\1", (source / "README.md").read_text(encoding="utf-8"))
    return _write(folder, {".gitignore": _filled("project/gitignore.tmpl"), **contents})


def _is_made(path: Path) -> bool:
    """Reports whether a file was made by a run of the example."""
    return any(part.startswith(".") or part in ("__pycache__", "out") for part in path.parts)


def _write(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    made = {folder / path: content for path, content in contents.items()}
    there = [str(path) for path in made if path.exists()]
    if there:
        raise NoetlError(f"{', '.join(there)} is there already; give a folder without")
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(made)
