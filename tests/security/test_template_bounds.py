"""Templates cannot exhaust memory or time: what they build and how long they take is bounded."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import pytest

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.templates import bounds
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.settings import get_settings
from tests.playbook.playbooks import HEAD

SCOPE: dict[str, Any] = {
    "workload": {
        "n": 10**9,
        "text": "x" * 1000,
        "rows": list(range(1000)),
        "wide": "%1000000000d",
        "braces": "{:1000000000}",
        "decimal": Decimal("1E+999999999"),
        "long": "x" * 1_000_000,
    }
}
DOUBLED = "{% set a = 'x' * 100 %}" + "{% set a = OP %}" * 40 + "{{ a }}"
SHARED = "{% set a = ['x'] %}" + "{% set a = OP %}" * 40

FILLED = "[1] | batch(1000, [1] | batch(1000, [1] | batch(1000, 'a') | list) | list) | list"

BUILDERS = {
    "gaps filled with lists, as text": "{{ FILLED | string | length }}".replace("FILLED", FILLED),
    "gaps filled with lists, as JSON": "{{ FILLED | tojson | length }}".replace("FILLED", FILLED),
    "gaps filled with lists": "{{ FILLED }}".replace("FILLED", FILLED),
    "gaps filled with lists, in a loop": "{% for a in [1] | batch(1000, FILLED) %}{{ a }}{% endfor %}".replace("FILLED", FILLED),
    "gaps filled with text": "{{ [1] | batch(3000, workload.long) | first | sort | length }}",
    "gaps of slices": "{{ [1] | slice(1000, fill_with=workload.long) | list | string | length }}",
    "a default of map": "{{ range(100000) | map(attribute='z', default=workload.long) | list | string | length }}",
    "a default of groupby": "{{ range(9999) | groupby('z', default=workload.long) | string | length }}",
    "fromkeys": "{{ dict.fromkeys(range(100000), workload.long) | string | length }}",
    "links in a long word": "{{ ('.' * 300000 ~ 'x.') | urlize | length }}",
    "wrapping a long space": "{{ (' ' * 400000) | wordwrap(1) | length }}",
    "many small values of JSON": "{{ ('[' ~ '[],' * 4000000 ~ '1]') | fromjson | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of powers": "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
    "power in a variable": "{% set a = 9 ** (9 ** 9) %}{{ a }}",
    "text in a variable": "{% set a = 'x' * 10 ** 10 %}{{ a }}",
    "text in an output": "{% set a = 1 %}{{ 'x' * 10 ** 10 }}",
    "width in a variable": "{% set a = 'x'.center(10 ** 10) %}{{ ('x' | center(10 ** 10)) ~ 'y' }}",
    "power in a loop": "{% for a in [9 ** (9 ** 9)] %}{{ 9 ** (9 ** 9) }}{% endfor %}",
    "power of a name": "{{ 2 ** workload.n }}",
    "text": "{{ 'x' * workload.n }}",
    "text from the right": "{{ workload.n * 'x' }}",
    "list": "{{ [1] * workload.n }}",
    "lists of lists": "{{ [[[[[1] * 1000] * 1000] * 1000] * 1000] * 1000 }}",
    "integers": "{% set a = 9 %}" + "{% set a = a * a %}" * 40 + "{{ a }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width from the workload": "{{ workload.wide % 1 }}",
    "width as a value": "{{ '%*d' % (workload.n, 1) }}",
    "precision": "{{ '%.1000000000f' % 1.5 }}",
    "filter format": "{{ '%1000000000d' | format(1) }}",
    "method format": "{{ '{:1000000000}'.format(1) }}",
    "method format of a name": "{{ workload.braces.format(1) }}",
    "method format with a width": "{{ '{:{}}'.format(1, workload.n) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format often": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "percent often": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "center": "{{ 'x' | center(workload.n) }}",
    "center of a constant": "{{ 'x' | center(1000000000) }}",
    "method center": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "translate": "{{ ('a' * 100000).translate({97: 'x' * 100000}) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "indent by a text": "{{ ('\n' * 100000) | indent('x' * 100000) }}",
    "wordwrap": "{{ ('x' * 100000) | wordwrap(1, true, 'x' * 100000) }}",
    "replace": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "method replace": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "join": "{{ range(100000) | join('x' * 100000) }}",
    "method join": "{{ ('x' * 100000).join(['a'] * 100000) }}",
    "join of joins": "{% set a = 'x' * 1000 %}" + "{% set a = ([a] * 10) | join(a) %}" * 6 + "{{ a }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "round down": "{{ 15 | round(-1000000000) }}",
    "int of a decimal": "{{ workload.decimal | int }}",
    "range": "{{ range(1000000000) | list }}",
    "doubled by +": DOUBLED.replace("OP", "a + a"),
    "doubled by ~": DOUBLED.replace("OP", "a ~ a"),
    "doubled by join": DOUBLED.replace("OP", "[a, a] | join"),
    "doubled by a block": DOUBLED.replace("{% set a = OP %}", "{% set a %}{{ a }}{{ a }}{% endset %}"),
    "doubled by a filter block": DOUBLED.replace("{% set a = OP %}", "{% set a %}{% filter upper %}{{a}}{{a}}{% endfilter %}{% endset %}"),
    "doubled by tojson": "{{ " + "'\\\\\\\\' | tojson" + " | tojson" * 40 + " }}",
    "doubled by sql_literal": "{{ " + "\"'\" | sql_literal" + " | sql_literal" * 40 + " }}",
    "doubled by replace": DOUBLED.replace("OP", "a | replace('x', 'xx')"),
    "lists doubled by +": SHARED.replace("OP", "a + a") + "{{ a }}",
    "shared lists as text": SHARED.replace("OP", "[a, a]") + "{{ a }}",
    "shared lists as JSON": SHARED.replace("OP", "[a, a]") + "{{ a | tojson }}",
    "shared tuples": SHARED.replace("OP", "(a, a)") + "{{ a | string }}",
    "shared mappings": SHARED.replace("OP", "{'a': a, 'b': a}") + "{{ a }}",
    "shared by dict": SHARED.replace("OP", "dict(a=a, b=a)") + "{{ a }}",
    "shared by dict alone": "{% set a = dict() %}" + "{% set a = dict(a=a, b=a) %}" * 40 + "{{ a }}",
    "shared by batch alone": "{% set a = workload.rows %}" + "{% set a = a | batch(1001, a) | list %}" * 40 + "{{ a }}",
    "shared by list": SHARED.replace("OP", "[a, a] | list") + "{{ a }}",
    "shared by batch": SHARED.replace("OP", "[a, a] | batch(2) | list") + "{{ a }}",
    "shared by map": SHARED.replace("OP", "[a, a] | map('list') | list") + "{{ a }}",
    "shared by *": SHARED.replace("OP", "[a] * 2") + "{{ a }}",
    "shared lists compared": SHARED.replace("OP", "[a, a]") + SHARED.replace("OP", "[b, b]").replace("a =", "b =") + "{{ a == b }}",
    "shared in nested loops": "".join("{% for " + f"b{n} in [[{', '.join([f'b{n-1}'] * 60)}]] %}}" for n in range(1, 8)).replace("b0", "1") + "{{ b7 }}" + "{% endfor %}" * 7,
    "output of loops": "{% set a = 'x' * 100000 %}{% for i in range(100000) %}{{ a }}{% endfor %}",
    "output of a macro": "{% set a = 'x' * 100000 %}{% macro m() %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endmacro %}{{ m() }}",
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops that filter": "{% for a in range(100000) %}{% for b in range(100000) if b < 0 %}{% endfor %}{% endfor %}",
    "loops over sums": "{{ ([range(100000)] * 100000) | map('sum') | list }}",
    "loops over lists": "{{ ([range(100000)] * 100000) | map('list') | list }}",
    "sum of lists": "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = ns.a + [i] * 100 %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loops": "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the time of each rendering."""
    settings = get_settings().model_copy(update={"template_seconds": 0.2})
    monkeypatch.setattr(bounds, "get_settings", lambda: settings)


@pytest.mark.parametrize("template", BUILDERS.values(), ids=BUILDERS)
def test_what_templates_build_is_bounded(template: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateError):
        compile_value(template).render(SCOPE)
    assert time.process_time() - began < 3


def test_rendering_has_a_time_limit() -> None:
    loop = "{% for a in range(30000) %}{% if 'no' in workload.rows %}{% endif %}{% set b = a | string %}{% endfor %}"
    began = time.process_time()
    with pytest.raises(TemplateError, match="NOETL_TEMPLATE_SECONDS"):
        compile_value(loop * 20).render(SCOPE)
    assert time.process_time() - began < 3


NESTED = {
    "parentheses": "{{ " + "(" * 90 + "1" + ")" * 90 + " }}",
    "many parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "lists": "{{ " + "[" * 90 + "]" * 90 + " }}",
    "mappings": "{{ " + "{1: " * 90 + "1" + "}" * 90 + " }}",
    "not": "{{ " + "not " * 5_000 + "1 }}",
    "minus": "{{ " + "-" * 5_000 + "1 }}",
    "calls": "{{ " + "a(" * 90 + ")" * 90 + " }}",
    "subscripts": "{{ " + "a[" * 90 + "1" + "]" * 90 + " }}",
    "else": "{{ " + "1 if a else " * 5_000 + "1 }}",
    "blocks": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "loops": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "sum": "{{ 1" + " + 1" * 1_000 + " }}",
    "or": "{{ 1" + " or 1" * 1_000 + " }}",
    "power": "{{ 1" + " ** 1" * 1_000 + " }}",
    "path": "{{ a" + ".a" * 1_000 + " }}",
    "filters": "{{ a" + "|list" * 1_000 + " }}",
    "tests": "{{ a" + " is defined" * 1_000 + " }}",
    "a long number": "{{ " + "9" * 10_000 + " }}",
}


@pytest.mark.usefixtures("short")
def test_a_loop_over_long_texts_ends_in_time() -> None:
    began = time.process_time()
    with pytest.raises(TemplateError, match="NOETL_TEMPLATE_SECONDS"):
        compile_value("{% for i in range(100000) %}{% if 'yyy' in workload.long %}{% endif %}{% endfor %}").render(
            SCOPE
        )
    assert time.process_time() - began < 5


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
        compile_value("{{ workload.text | from_json }}").render({"workload": {"text": "[" * 1000 + "]" * 1000}})


@pytest.mark.parametrize(
    "setting",
    ["timeout: '{{ 9 ** (9 ** 9) }}'", "timeout: '{{ workload.n * [1] }}'", "loop_mode: '{{ \"x\" * 10 ** 10 }}'"],
)
def test_validation_evaluates_nothing_without_bounds(setting: str) -> None:
    text = (
        HEAD
        + f"workload: {{n: 1000000000}}\nworkflow:\n- step: start\n  loop: {{in: [1], iterator: x}}\n  tool: {{kind: noop}}\n  spec: {{{setting}}}\n"
    )
    began = time.process_time()
    problems = parse_report(text)[1]
    assert time.process_time() - began < 1
    assert any("bits" in problem.message or "NOETL_TEMPLATE_BYTES" in problem.message for problem in problems)


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
        ("{{ 'x' | center(5) }}", "  x  "),
        ("{{ [1, 2] | join('-') }}", "1-2"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}", [[1, 2], [3, 0]]),
        ("{{ ['b', 'a'] | sort | map('upper') | list }}", ["A", "B"]),
        ("{% set a = [1] %}{% for i in range(3) %}{{ a + [i] }}{% endfor %}", "[1, 0][1, 1][1, 2]"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) }}{{ m('b') }}", "<1><b>"),
        ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "12"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b ~ '!' }}{% endfor %}", "x1!"),
        ("{{ 1 + 1.5 }}", 2.5),
        ("{{ (workload.rows | length) * 2 }}", 2000),
        ("{{ [[1], [2, 3]] | sum(start=[]) }}", [1, 2, 3]),
        ("{{ [{'a': [1]}, {'a': [2]}] | sum('a', start=[0]) }}", [0, 1, 2]),
        ("{{ [1, 2.5] | sum(start=1) }} {{ [{'a': 2}] | sum(attribute='a') }}", "4.5 2"),
        ("{{ range(100000) | batch(1) | sum(start=[]) | length }}", 100000),
        ("{{ [{'a': ['x']}, {}] | map(attribute='a', default=['none']) | list }}", [["x"], ["none"]]),
        ("{{ ('some words ' * 1000) | wordwrap(20) | wordcount }}", 2000),
        ("{{ 'see https://a.example/b.' | urlize | length > 30 }}", True),
        ("{% for i in range(300) %}{{ loop.length if loop.last }}{% endfor %}", "300"),
        ("{% for i in range(50000) %}{{ i }},{% endfor %}", "".join(f"{i}," for i in range(50000))),
    ],
)
def test_ordinary_templates_are_as_before(template: str, value: Any) -> None:
    assert compile_value(template).render(SCOPE) == value
