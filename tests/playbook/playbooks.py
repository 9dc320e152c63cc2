"""Short ways to write and compare playbooks in these tests."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Any

from pydantic import BaseModel

from noetl_dagster.errors import Problem
from noetl_dagster.playbook.loader import parse_playbook, parse_report
from noetl_dagster.playbook.models import Playbook, Step, Task
from tests.playbooks import text_of

HEAD = text_of("sample", "")


def with_steps(steps: str, *, root: str = "") -> str:
    """A playbook of the given steps (a YAML list), with further root sections."""
    return HEAD + dedent(root) + "workflow:\n" + indent(dedent(steps).strip("\n"), "  ") + "\n"


def load(steps: str, *, root: str = "") -> Playbook:
    return parse_playbook(with_steps(steps, root=root), file="sample.yaml")


def step_of(steps: str, *, root: str = "") -> Step:
    """The first step."""
    return load(steps, root=root).steps[0]


def task_of(tool: str) -> Task:
    """The only task of a step with the given ``tool`` mapping."""
    return step_of("- step: start\n  tool:\n" + indent(dedent(tool).strip("\n"), "    ")).tasks[0]


def problems_of(steps: str, *, root: str = "") -> list[Problem]:
    return parse_report(with_steps(steps, root=root), file="sample.yaml")[1]


def errors_of(steps: str, *, root: str = "") -> list[str]:
    return [str(problem) for problem in problems_of(steps, root=root) if problem.severity == "error"]


def warnings_of(steps: str, *, root: str = "") -> list[str]:
    return [str(problem) for problem in problems_of(steps, root=root) if problem.severity == "warning"]


def meaning(model: BaseModel) -> Any:
    """A model without places and source text: what two spellings must agree on."""
    return _stripped(model.model_dump(mode="python"))


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if key not in ("place", "source", "file")}
    if isinstance(value, (list, tuple)):
        return [_stripped(item) for item in value]
    return value
