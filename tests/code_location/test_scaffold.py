"""Commented starts are right as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from noetl_dagster.code_location.scaffold import new_playbook, new_step, with_step
from noetl_dagster.errors import PlaybookError, ProblemKind
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS

TOOLS = [kind for kind in TOOL_KINDS if kind != "workbook"]  # whose task a start cannot know


def test_a_playbook_has_no_mistakes() -> None:
    playbook, problems = parse_report(new_playbook("cubes", path="lab/cubes"), code=True)
    assert problems == []
    assert playbook is not None
    assert (playbook.name, playbook.asset_key("total")) == ("cubes", ("lab", "cubes", "total"))


@pytest.mark.parametrize("kind", TOOLS)
def test_a_step_of_every_kind_has_no_mistakes(kind: str) -> None:
    text = with_step(new_playbook("cubes", path="lab/cubes"), new_step("extra", kind), "cubes.yaml")
    playbook, problems = parse_report(text.replace("[total]", "[total, extra]"), code=True)
    assert [problem for problem in problems if problem.kind != ProblemKind.MISSING_EXTRA] == []
    assert playbook is not None
    assert [task.kind for task in playbook.step("extra").tasks] == [kind]


BEFORE = """
workflow:
  - step: one # first
    tool: {kind: noop}
    # next: nothing
"""


@pytest.mark.parametrize("after", ["", "\n# what follows\nworkbook: {}\n", "workload: {a: 1}\n"])
def test_a_step_goes_to_the_end_of_the_workflow(after: str) -> None:
    text = with_step(BEFORE + after, new_step("two", "noop"), "f.yaml")
    assert [step["step"] for step in yaml.safe_load(text)["workflow"]] == ["one", "two"]
    assert text.startswith(BEFORE)
    assert text.endswith(after)


def test_a_workflow_without_indentation_and_without_a_last_newline() -> None:
    text = with_step("workflow:\n- step: one\n  tool: {kind: noop}", new_step("two", "noop"), "f.yaml")
    assert [step["step"] for step in yaml.safe_load(text)["workflow"]] == ["one", "two"]


@pytest.mark.parametrize("text", ["workflow: [{step: one}]\n", "workload: {}\n", "- a\n", "", "workflow: [\n"])
def test_what_has_no_list_of_steps_is_left_alone(text: str) -> None:
    with pytest.raises(PlaybookError, match=r"f\.yaml"):
        with_step(text, new_step("two", "noop"), "f.yaml")


def test_an_unknown_kind() -> None:
    with pytest.raises(PlaybookError, match="there is no tool 'phyton'"):
        new_step("two", "phyton")


def test_templates_are_in_the_package() -> None:
    import noetl_dagster.code_location

    assert (Path(noetl_dagster.code_location.__file__).parent / "templates" / "playbook.yaml").is_file()
