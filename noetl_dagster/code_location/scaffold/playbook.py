"""A new playbook, and a new step at the end of one, with comments that say what may stand there."""

from __future__ import annotations

import textwrap
from importlib.resources import files
from importlib.resources.abc import Traversable
from string import Template

import yaml

from noetl_dagster.errors import Place, PlaybookError, Problem
from noetl_dagster.playbook.tool_kinds import SUPPORTED_KINDS, TOOL_KINDS

TEMPLATES = files("noetl_dagster.code_location.scaffold") / "templates"


def new_playbook(name: str, *, path: str, file: str | None = None) -> str:
    """The text of a playbook of two steps, which runs as it is.

    Args:
        name: of its job.
        path: ``metadata.path``, the first parts of its assets' keys.
        file: where it will stand; default: ``playbooks/<name>.yaml``.
    """
    return filled(TEMPLATES / "playbook.yaml", name=name, path=path, file=file or f"playbooks/{name}.yaml")


def new_step(name: str, kind: str) -> str:
    """The text of a step, as an entry of ``workflow`` without indentation.

    Raises:
        PlaybookError: there is no such kind of tool.
    """
    if kind not in TOOL_KINDS:
        known = ", ".join(SUPPORTED_KINDS)
        raise PlaybookError(
            [Problem(Place("--kind", 1), f"there is no tool {kind!r}; the kinds are {known}")]
        )
    template = TEMPLATES / "steps" / f"{kind}.yaml"
    if template.is_file():
        return filled(template, name=name)
    tool = TOOL_KINDS[kind]
    needs = tool.needs if tool.needs_all else tool.needs[:1]
    fields = [f"    {field}: ... # put in what it is" for field in needs]
    lines = [f"- step: {name}", "  tool:", f"    kind: {kind}", *fields, "  # next: [another_step]"]
    return "\n".join(lines) + "\n"


def with_step(text: str, step: str, file: str) -> str:
    """A playbook's text with a step at the end of its workflow; everything else stays as it is written.

    Args:
        step: as :func:`new_step` gives it.
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


def filled(template: Traversable, **names: str) -> str:
    """A template of this package with its ``$names`` filled in."""
    return Template(template.read_text(encoding="utf-8")).substitute(names)
