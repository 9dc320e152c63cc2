"""Warnings about values that YAML reads otherwise than they look, and about names that mean another value."""

from __future__ import annotations

import pytest

from noetl_dagster.playbook.loader import parse_report
from tests.playbook.playbooks import with_steps

NOTHING = "- step: start\n  tool: {kind: noop}\n"


def warnings_of(steps: str, root: str = "") -> list[str]:
    playbook, problems = parse_report(with_steps(steps, root=root), file="x.yaml", code=True)
    assert playbook is not None
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("spelled", "reads"),
    [
        ("01234", "668: a leading 0 means octal"),
        ("-010", "-8: a leading 0 means octal"),
        ("12:30:45", "45045: colons mean base 60"),
        ("12:30.5", "750.5: colons mean base 60"),
        ("no", "the boolean false: write true or false"),
        ("Yes", "the boolean true: write true or false"),
        ("on", "the boolean true: write true or false"),
        ("1e3", "the text '1e3': a number has a point and a signed exponent"),
        ("0o17", "the text '0o17': octal numbers begin with 0"),
        *(
            (harmless, "")
            for harmless in ("'01234'", '"no"', "true", "0", "09:30", "12", "1.0e+3", "0x1F", "noon", "~")
        ),
    ],
)
def test_spellings_of_yaml_1_1(spelled: str, reads: str) -> None:
    in_workload = warnings_of(NOTHING, root=f"workload: {{a: [{spelled}]}}\n")
    in_input = warnings_of(f"- step: start\n  tool: {{kind: noop, input: {{b: {spelled}}}}}\n")
    if not reads:
        assert (in_workload, in_input) == ([], [])
        return
    [workload], [input] = in_workload, in_input
    assert f"x.yaml:4:16: warning: workload, a[0]: YAML reads {spelled} as {reads}" in workload
    assert f"input, b: YAML reads {spelled} as {reads}" in input


def test_booleans_of_settings_may_be_yes_and_no() -> None:
    assert warnings_of("- step: start\n  tool: {kind: http, url: x, verify_ssl: no}\n") == []


TWO = "- step: one\n  {}\n  next: [two]\n- step: two\n  tool: {{kind: noop, input: {{a: '{{{{ {} }}}}'}}}}\n"
CODE = "tool: {kind: python, code: \"result = {'status': 'mine', 'data': {'x': 1}, 'x': 9}\"}"
SQL = "tool: {kind: postgres, auth: a, command: SELECT 1}"


@pytest.mark.parametrize(
    ("step", "expression", "warning"),
    [
        (SQL, "one.rowcount", "a: the result of step 'one' has no 'rowcount'; did you mean 'row_count'?"),
        (SQL, "one.rows[0].anything + one.row_count", ""),
        (SQL, "one.command_1.rows", ""),
        ("tool: {kind: postgres, auth: a, command: SELECT 1, as: table}", "one.anything", ""),
        ("tool: {kind: shell, cmd: ls}", "one.output", "has no 'output'; known keys: exit_code, stdout"),
        ("tool: {kind: http, url: x}", "one.anything", ""),
        ("tool: {kind: noop, result: {ready: 1}}", "one.redy", "has no 'redy'; did you mean 'ready'?"),
        ("tool: {kind: noop, result: {data: {a: 1}}}", "one.a", ""),
        ("tool: {kind: noop, result: '{{ x }}'}", "one.a", ""),
        (SQL + "\n  output: {n: 1}", "one.row_count", "has no 'row_count'; known keys: n"),
        (SQL + "\n  loop: {in: [1], iterator: x}", "one.rows", "has no 'rows'; known keys: total, done"),
        (SQL + "\n  loop: {in: [1], iterator: x}", "one.results | length + one.stats.failed", ""),
        (SQL + "\n  loop: {in: [1], iterator: one}", "one.anything", ""),
        (CODE, "one.status", "one.status is how the step ended; the result's own key is one.data.status"),
        (CODE, "one.data", "one.data is the whole result; the result's own key is one.data.data"),
        (CODE, "one.data.x + one.x", ""),
        ("tool: {kind: python, code: 'result = 1'}", "one.status", ""),
    ],
)
def test_keys_of_results(step: str, expression: str, warning: str) -> None:
    found = [text for text in warnings_of(TWO.format(step, expression)) if "nothing in the playbook" not in text]
    assert bool(found) is bool(warning), found
    assert warning in "".join(found)


def test_a_workload_key_hides_a_step() -> None:
    [warning] = warnings_of(NOTHING, root="workload: {start: 1}\n")
    assert "x.yaml:4:12: warning: workload key 'start' hides the result of step 'start' in templates" in warning
