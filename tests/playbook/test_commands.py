"""Commands of shell, script and container may hold braces of other programs; ``check`` warns about them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from noetl_dagster.errors import Problem, ProblemKind
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.worker.program import compile_step
from tests.playbook.playbooks import HEAD, errors_of, problems_of, warnings_of

REMEDY = "write {% raw %} and {% endraw %} around what another program reads"
IS_NONE = f"is no template and stays as it is; {REMEDY}"


def playbook_of(task: dict[str, Any], where: str) -> dict[str, Any]:
    """A playbook with a task in one of the places where tasks may stand."""
    fields = {key: value for key, value in task.items() if key != "kind"}
    match where:
        case "spec":
            tool: Any = {"kind": task["kind"], "spec": fields}
        case "labelled":
            tool = [{"ask": task}]
        case "workbook":
            return {
                "workbook": [{"name": "ask", "tool": task}],
                "workflow": [{"step": "start", "tool": {"kind": "workbook", "task": "ask"}}],
            }
        case "beside":
            return {"workflow": [{"step": "start", "tool": task["kind"], **fields}]}
        case _:
            tool = task
    return {"workflow": [{"step": "start", "tool": tool}]}


@pytest.mark.parametrize("kind", ["shell", "script", "container"])
@pytest.mark.parametrize("where", ["tool", "spec", "labelled", "workbook", "beside"])
def test_commands_hold_braces_of_other_programs(kind: str, where: str) -> None:
    command = "command" if kind == "container" else "cmds"
    texts = ["docker ps --format '{{json .}}'", "echo {{ name }} {{ x | }}"]
    task = {"kind": kind, command: texts, "env": {"SIZE": "${#B} {{ name }}"}}
    task |= {"image": "busybox"} if kind == "container" else {}
    task |= {"args": ["{%s}"]} if where != "beside" else {}  # there, they would be the step's input
    text = HEAD + yaml.safe_dump({"workload": {"name": "web"}, **playbook_of(task, where)}, width=1_000)

    playbook, problems = parse_report(text)

    assert playbook is not None, problems
    found = [problem for problem in problems if problem.kind is ProblemKind.FOREIGN_BRACES]
    assert {problem.severity for problem in found} == {"warning"}
    parts = {f"{command}[0]": "{{json .}}", f"{command}[1]": "{{ x | }}", "SIZE": "${#B}", "args[0]": "{%s}"}
    assert {problem.message for problem in found} == {
        f"{label}: {part} {IS_NONE}" for label, part in parts.items() if label != "args[0]" or "args" in task
    }
    assert all(problem.message.split(": ")[1].split(" is")[0] in line_of(problem, text) for problem in found)
    rendered = compile_step(playbook, playbook.steps[0]).tasks[0].config.render({"name": "web"})
    assert rendered[command] == [texts[0], "echo web {{ x | }}"]
    assert rendered["env"] == {"SIZE": "${#B} web"}
    assert rendered.get("args") == task.get("args")


def line_of(problem: Problem, text: str) -> str:
    return text.splitlines()[problem.place.line - 1]


def test_a_warning_names_line_field_and_parts() -> None:
    steps = """
        - step: start
          tool:
            kind: shell
            cmds: |
              echo {% raw %}{{.Raw}}{% endraw %}
              docker ps --format '{{.ID}} {{.Names}} {{.ID}}'
              docker images --format '{{.A}}{{.B}}{{.C}}{{.D}}{{.E}}{{.F}}'
        """
    assert warnings_of(steps) == [
        f"sample.yaml:10:9: warning: cmds: {{{{.ID}}}}, {{{{.Names}}}} are no templates and stay as they are; {REMEDY}",
        "sample.yaml:11:9: warning: cmds: {{.A}}, {{.B}}, {{.C}}, {{.D}}, {{.E}} and 1 more are no templates and stay "
        f"as they are; {REMEDY}",
    ]


def test_many_lines_give_a_few_warnings() -> None:
    lines = "".join(f"    echo ${{#v{n}}}\n" for n in range(150))
    assert len(warnings_of(f"- step: start\n  tool:\n   kind: shell\n   cmds: |\n{lines}")) == 20


@pytest.mark.parametrize("merged", ["{<<: *docker, kind: shell}", "shell\n  <<: *docker"])
def test_commands_of_an_anchor(merged: str) -> None:
    root = "workload:\n  docker: &docker {cmds: [\"docker ps --format '{{json .}}'\"]}\n"
    problems = problems_of(f"- step: start\n  tool: {merged}\n", root=root)
    assert [problem.kind for problem in problems] == [ProblemKind.FOREIGN_BRACES]


def test_an_inline_script_of_a_container_is_a_command() -> None:
    script = "{source: {type: inline}, code: \"docker ps --format '{{json .}}' {{ nope }}\"}"
    warnings = warnings_of(f"- step: start\n  tool: {{kind: container, image: x, script: {script}}}\n")
    assert any(f"code: {{{{json .}}}} {IS_NONE}" in warning for warning in warnings)
    assert any("nothing in the playbook defines 'nope'" in warning for warning in warnings)


@pytest.mark.parametrize(
    "tool",
    [
        "{kind: http, url: 'http://x/{{json .}}'}",
        "{kind: postgres, auth: pg, command: 'SELECT {{json .}}'}",
        "{kind: shell, cmds: ls, cwd: '{{json .}}'}",
        "{kind: shell, cmds: ls, input: {a: '{{json .}}'}}",
        "{kind: container, image: '{{json .}}', command: ls}",
    ],
)
def test_other_fields_must_be_templates(tool: str) -> None:
    [error] = errors_of(f"- step: start\n  tool: {tool}\n")
    assert "{{json .}}" in error
    assert "does not parse" in error
    assert REMEDY not in error


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("{% if a %}ls {{.x}}", "Unexpected end of template"),
        ("echo {{ workload | shell_quot }}", "no filter is called 'shell_quot'"),
    ],
)
def test_wrong_templates_in_commands_are_refused(command: str, reason: str) -> None:
    [error] = errors_of(f"- step: start\n  tool: {{kind: shell, cmds: '{command}'}}\n")
    assert reason in error
    assert REMEDY in error


def test_unknown_names_in_commands_are_as_before() -> None:
    steps = "- step: start\n  tool: {kind: shell, cmds: \"docker ps --format '{{ Names }}'\"}\n"
    [warning] = warnings_of(steps)
    assert "nothing in the playbook defines 'Names'" in warning
