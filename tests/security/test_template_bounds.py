"""Operators of templates cannot exhaust memory or time, and what is nested too deep is a template error."""

from __future__ import annotations

import time
from typing import Any

import pytest

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.templates.rendering import compile_value
from tests.playbook.playbooks import HEAD

SCOPE: dict[str, Any] = {"workload": {"n": 10**8, "wide": "%1000000000d", "text": "[" * 1000 + "]" * 1000}}

BUILDERS = (
    "{{ 9 ** (9 ** 9) }}",
    "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
    "{{ 'x' ~ 9 ** (9 ** 9) }}",
    "{% set a = 9 ** (9 ** 9) %}{{ a }}",
    "{% set a = 'x' * 10 ** 10 %}{{ a }}",
    "{% for a in [9 ** (9 ** 9)] %}{{ a }}{% endfor %}",
    "{{ 2 ** workload.n }}",
    "{{ 'x' * workload.n }}",
    "{{ workload.n * 'x' }}",
    "{{ [1] * workload.n }}",
    "{% set a = 9 %}" + "{% set a = a * a %}" * 40 + "{{ a }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ workload.wide % 1 }}",
    "{{ '%*d' % (workload.n, 1) }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ range(1000000000) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
)


@pytest.mark.parametrize("template", BUILDERS)
def test_operators_have_limits(template: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateError):
        compile_value(template).render(SCOPE)
    assert time.process_time() - began < 1


NESTED = {
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "lists": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "not": "{{ " + "not " * 5_000 + "1 }}",
    "calls": "{{ " + "a(" * 150 + ")" * 150 + " }}",
    "else": "{{ " + "1 if a else " * 5_000 + "1 }}",
    "blocks": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "loops": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "sum": "{{ 1" + " + 1" * 1_000 + " }}",
    "path": "{{ a" + ".a" * 1_000 + " }}",
    "filters": "{{ a" + "|list" * 1_000 + " }}",
    "a long number": "{{ " + "9" * 10_000 + " }}",
}


@pytest.mark.parametrize("template", NESTED.values(), ids=NESTED)
def test_what_is_nested_too_deep_is_a_template_error(template: str) -> None:
    with pytest.raises(TemplateError):
        compile_value(template).render(SCOPE)
    step = f"workflow:\n- step: start\n  tool: {{kind: noop}}\n  when: '{template}'\n  input: {{x: '{template}'}}\n"
    playbook, problems = parse_report(HEAD + step, code=True)
    assert playbook is None
    assert problems


def test_deep_values_are_a_template_error() -> None:
    with pytest.raises(TemplateError, match="nested too deep"):
        compile_value("{{ workload.text | from_json }}").render(SCOPE)


def test_compiling_computes_nothing() -> None:
    assert (
        compile_value(
            "{% set a = 1 %}{% if a == 2 %}{{ ()[1.5:] or 'x' | center(99999999999) }}{% endif %}{{ a }}"
        ).render({})
        == "1"
    )


@pytest.mark.parametrize("setting", ["timeout: '{{ 9 ** (9 ** 9) }}'", "timeout: '{{ workload.n * [1] }}'"])
def test_validation_evaluates_nothing_without_bounds(setting: str) -> None:
    step = "{step: start, loop: {in: [1], iterator: x}, tool: {kind: noop}, spec: {SETTING}}"
    text = f"{HEAD}workload: {{n: 1000000000}}\nworkflow: [{step.replace('SETTING', setting)}]\n"
    began = time.process_time()
    problems = parse_report(text)[1]
    assert time.process_time() - began < 1
    assert any("gives" in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ 2 ** 10 }}", 1024),
        ("{{ 2 ** 0.5 }}", 2**0.5),
        ("{{ 2 ** -1 }}", 0.5),
        ("{{ 7 % 4 * 3 }}", 9),
        ("{{ 'ab' * 3 }}", "ababab"),
        ("{{ '%05.1f' % 2.25 }}", "002.2"),
        ("{{ '%s-%s' % ('a', 1) }}", "a-1"),
        ("{{ '%(a)s' % {'a': 1} }}", "1"),
        ("{{ '{:>5}|{a}'.format(1, a=2) }}", "    1|2"),
        ("{{ [[1], [2, 3]] | sum(start=[]) }}", [1, 2, 3]),
        ("{{ [{'a': [1]}, {'a': [2]}] | sum('a', start=[0]) }}", [0, 1, 2]),
        ("{{ [1, 2.5] | sum(start=1) }} {{ [{'a': 2}] | sum(attribute='a') }}", "4.5 2"),
        ("{% set a = [1] %}{% for i in range(3) %}{{ a + [i] }}{% endfor %}", "[1, 0][1, 1][1, 2]"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) }}{{ m('b') }}", "<1><b>"),
        ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "12"),
    ],
)
def test_ordinary_templates_are_as_before(template: str, value: Any) -> None:
    assert compile_value(template).render(SCOPE) == value
