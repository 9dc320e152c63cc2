"""Syntax errors of code are found without running it, at their own line and column."""

from __future__ import annotations

import textwrap
from types import FunctionType

import pytest

from noetl_dagster.playbook.code import compile_python, expressions_in
from noetl_dagster.playbook.loader import parse_playbook, parse_report
from tests.playbook.playbooks import HEAD


def found(steps: str) -> list[str]:
    text = f"{HEAD}workflow:\n{steps}"
    _, problems = parse_report(text, file="flow.yaml", code=True)
    first = text.splitlines().index("workflow:") + 1
    return [
        f"{problem.place.line - first}:{problem.place.column} {problem.message}"
        for problem in problems
        if problem.severity == "error"
    ]


BLOCK = """\
  - step: start
    tool:
      - name: fine
        kind: python
        code: |
          result = "{{ not a template }}"
      - name: broken
        kind: python
        code: |
          def main(n):

              return (n +
"""
QUOTED = """\
  - step: start
    tool: {kind: python, code: "result = 1 +* 2"}
"""
LABELLED = """\
  - step: start
    tool:
      work:
        kind: spark
        code: |-
          def main(spark)
              return 1
"""
RETURNING = """\
from __future__ import annotations
total: int = 0
later: str
def add(n):
    global total
    total += n
class Reader:
    def read(self): return total
for number in range(3):
    add(number)
    if total > 2:
        return [total, Reader().read(), [total for _ in range(2)]]
"""
FOLDED = """\
  - step: start
    tool:
      kind: python
      code: >
        result = 1
        x y
"""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (BLOCK, "12:22 code: '(' was never closed"),
        (QUOTED, "2:45 code: invalid syntax"),
        (LABELLED, "6:26 code: expected ':'"),
        (FOLDED, "4:13 code: invalid syntax"),
    ],
)
def test_a_syntax_error_has_its_place(steps: str, expected: str) -> None:
    [problem] = found(steps)
    assert problem.startswith(expected)


def test_only_python_code_is_compiled() -> None:
    assert found('  - step: start\n    tool: {kind: script, code: "echo $1 | wc"}\n') == []


def test_code_that_is_no_text_is_no_code() -> None:
    assert found("  - {step: start, tool: {kind: python, code: {a: [1]}}}\n") == []


def test_loading_leaves_code_alone() -> None:
    """A step with broken code may never be reached, or its failure may be routed."""
    assert parse_playbook(f"{HEAD}workflow:\n{QUOTED}").steps


def warned(code: str) -> list[str]:
    """Warnings about a step ``load`` whose code stands from line 1 on, at column 11."""
    steps = f"  - step: load\n    tool:\n      kind: python\n      code: |\n{textwrap.indent(code, ' ' * 10)}"
    text = f"{HEAD}workload: {{rows: [1]}}\nworkflow:\n{steps}"
    _, problems = parse_report(text, file="flow.yaml", code=True)
    first = text.splitlines().index("      code: |") + 1
    return [f"{problem.place.line - first}:{problem.place.column} {problem.message}" for problem in problems]


def test_templates_between_texts_are_checked_like_others() -> None:
    assert warned("n = {{ rows | length }}\nif n:\n    return {'n': n}\n") == []
    (unknown,) = warned("x = 1\nresult = [x, {{ rosw }}]\n")
    (broken,) = warned("result = {{ rows | sorted_by_moon }}\n")

    assert unknown.startswith("2:24 code: nothing in the playbook defines 'rosw'; did you mean 'rows'")
    assert "1:20" in broken
    assert "no filter is called 'sorted_by_moon'" in broken


def test_code_that_is_one_template_does_nothing() -> None:
    (warning,) = warned("{{ rows }}\n")
    assert "code: all of it is one template, whose value does nothing" in warning


def test_templates_inside_texts_are_pointed_out_where_they_name_a_value() -> None:
    code = "a = '{{ colour }}'\nb = f'{{ rows }}'\n# {{ rows }}\nresult = [a, b, '{{ rows[0] }}']\n"

    assert warned(code) == [
        "4:28 code: {{ rows[0] }} in a string literal of Python is not rendered; "
        "take the quotes away, or hand 'rows' over with input"
    ]


@pytest.mark.parametrize(
    ("source", "templates"),
    [
        ("x = {{ a }}", ["{{ a }}"]),
        ("x = {'a': {'b': {{ c }}}}", ["{{ c }}"]),
        ("x = {{ {'a': {'b': 1}} }}", ["{{ {'a': {'b': 1}} }}"]),
        ("x = [{{ a | default('}}') }}, {{b}}]", ["{{ a | default('}}') }}", "{{b}}"]),
        ("x = {{\n  a\n}}", ["{{\n  a\n}}"]),
        ("x = {'a': {'b': 1}}", []),
        ("x = {{1: 'a'}[1]: 2}", []),
        ("x = '{{ a }}' '''\n{{ b }}''' # {{ c }}", []),
        ("x = f'{{ {a} }}' rf'{{{b}}}'", []),
        ("x = {{ a", []),
    ],
)
def test_templates_stand_between_texts(source: str, templates: list[str]) -> None:
    assert [found.source for found in expressions_in(source)] == templates


def test_names_of_code_that_returns_are_those_of_a_module() -> None:
    code, returns = compile_python(RETURNING, "<code>")

    assert returns
    assert FunctionType(code, {})() == [3, 3, [3, 3]]


def test_returns_inside_functions_change_nothing() -> None:
    _, returns = compile_python("def main():\n    return 1\nclass A:\n    def b(self): return 2\n", "<code>")

    assert not returns
