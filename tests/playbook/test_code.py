"""Syntax errors of code are found without running it, at their own line and column."""

from __future__ import annotations

import pytest

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


def test_loading_leaves_code_alone() -> None:
    """A step with broken code may never be reached, or its failure may be routed."""
    assert parse_playbook(f"{HEAD}workflow:\n{QUOTED}").steps
