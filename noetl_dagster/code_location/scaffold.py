"""Commented templates: a project that works, a playbook, and a step."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from noetl_dagster.errors import NoetlError, Place, PlaybookError, Problem
from noetl_dagster.extras import shipped_folder
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS

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


def new_step(name: str, kind: str) -> str:
    """Returns the text of a step, as an entry of ``workflow`` without indentation.

    Raises:
        PlaybookError: there is no such kind of tool.
    """
    if kind not in TOOL_KINDS:
        kinds = ", ".join(TOOL_KINDS)
        raise PlaybookError([Problem(Place("--kind", 1), f"there is no tool {kind!r}; the kinds are {kinds}")])
    template = f"steps/{kind}.yaml"
    if (TEMPLATES / template).is_file():
        return _filled(template, name=name)
    tool = TOOL_KINDS[kind]
    needs = tool.needs if tool.needs_all else tool.needs[:1]
    fields = [f"    {field}: ... # put in what it is" for field in needs]
    lines = [f"- step: {name}", "  tool:", f"    kind: {kind}", *fields, "  # next: [another_step]"]
    return "\n".join(lines) + "\n"


def with_step(text: str, step: str, file: str) -> str:
    """Adds a step to the end of a playbook's workflow, and leaves the rest of the text as it is.

    Args:
        step: from :func:`new_step`.
        file: names the playbook in messages.

    Raises:
        PlaybookError: the text has no workflow, written as a list of blocks.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlaybookError([Problem(Place(file, 1), f"is not YAML: {error}")]) from None
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    steps = next((value for key, value in pairs if key.value == "workflow"), None)
    if not isinstance(steps, yaml.SequenceNode) or steps.flow_style or not steps.value:
        raise PlaybookError(
            [Problem(Place(file, 1), "has no workflow as a list of steps, to which one could be added")]
        )
    lines = text.splitlines(keepends=True)
    end = steps.end_mark.line if steps.end_mark.column == 0 else len(lines)
    while not lines[end - 1].strip() or lines[end - 1].startswith("#"):  # these belong to what comes next
        end -= 1
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    entry = textwrap.indent(step, " " * steps.start_mark.column)
    return "".join([*lines[:end], "\n", entry, *lines[end:]])


def _filled(template: str, **names: str) -> str:
    """Returns a template of this package with its ``$names`` filled in."""
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(names)


class ProjectExistsError(NoetlError):
    """The folder of a new project has files of the same names."""


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
        UnknownExampleError: there is no such example; the message lists them.
        ProjectExistsError: a file is there already; nothing was written.
    """
    titles = examples()
    if example not in titles:
        listed = "".join(f"\n  {name:20} {title}" for name, title in titles.items())
        raise UnknownExampleError(f"there is no example {example!r}; the examples are{listed}")
    source = shipped_folder("examples") / example
    paths = sorted(path for path in source.rglob("*") if path.is_file() and not _is_made(path.relative_to(source)))
    contents: dict[str, str | bytes] = {str(path.relative_to(source)): path.read_bytes() for path in paths}
    contents["README.md"] = OUTWARD_LINK.sub(r"\1", (source / "README.md").read_text(encoding="utf-8"))
    return _write(folder, {".gitignore": _filled("project/gitignore.tmpl"), **contents})


class UnknownExampleError(NoetlError):
    """There is no example of this name."""


def _is_made(path: Path) -> bool:
    """Reports whether a file was made by a run of the example."""
    return any(part.startswith(".") or part in ("__pycache__", "out") for part in path.parts)


def _write(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    made = {folder / path: content for path, content in contents.items()}
    there = [str(path) for path in made if path.exists()]
    if there:
        raise ProjectExistsError(f"{', '.join(there)} is there already; give a folder without")
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(made)
