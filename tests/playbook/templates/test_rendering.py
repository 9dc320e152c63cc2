"""Rendering: types, undefined names, sandbox, conditions, caching."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.errors import TemplateError, UndefinedNameError
from noetl_dagster.playbook.templates.rendering import compile_fields, compile_value, condition, is_true
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView


def render(template: Any, **names: Any) -> Any:
    return compile_value(template).render(names)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, 3, 2.5, True, None, "text", b"bytes", object()])
def test_one_expression_keeps_the_type(value: Any) -> None:
    assert render("{{ x }}", x=value) is value
    assert render("  {{ x }}\n", x=value) is value


def test_anything_else_is_text() -> None:
    assert render("{{ a }}{{ b }}", a=1, b=2) == "12"
    assert render("n = {{ a }}", a=1) == "n = 1"
    assert render("{% if a %}yes{% endif %}", a=1) == "yes"
    assert render("{{ a }}}}", a=1) == "1}}"


def test_lists_and_mappings_are_rendered_inside() -> None:
    template = {"{{ k }}": ["{{ a }}", 1, {"deep": "x{{ a }}"}], "same": "text"}
    assert render(template, k="key", a=5) == {"key": [5, 1, {"deep": "x5"}], "same": "text"}


def test_constants_need_no_scope() -> None:
    compiled = compile_value({"a": [1, "text", None]})
    assert compiled.constant
    assert compiled.names == frozenset()
    assert compiled.render({}) == {"a": [1, "text", None]}


def test_names_of_a_template() -> None:
    assert compile_value("{{ a.b[c] | default(d) }}").names == {"a", "c", "d"}
    assert compile_value(["{{ a }}", {"x": "{{ b }}"}]).names == {"a", "b"}
    assert compile_value("{% set x = a %}{% for i in x %}{{ i }}{{ range(3) }}{% endfor %}").names == {"a"}


def test_the_same_text_is_compiled_once() -> None:
    assert compile_value("{{ some.name }}") is compile_value("{{ some.name }}")


def test_lazy_sequences_become_lists() -> None:
    assert render("{{ xs | map('upper') }}", xs=["a"]) == ["A"]
    assert render("{{ range(3) }}") == [0, 1, 2]
    assert render("{{ {'a': 1}.keys() }}") == ["a"]


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ x | tojson }}", '{"a": "<é>\'\\""}'),
        ("body={{ x | tojson }}", 'body={"a": "<é>\'\\""}'),
        ("{{ '[1]' | fromjson }}", [1]),
        ("{{ 'abc' | b64encode }}", "YWJj"),
        ("{{ 'YWJj' | b64decode }}", "abc"),
        ("{{ '5' | int + 1 }}", 6),
        ("{{ 'a-b' | replace('-', '+') }}", "a+b"),
        ("{{ 'O''Brien' | replace(\"'\", \"''\") }}", "OBrien"),
        ("{{ name | sql_literal }}", "'O''Brien'"),
    ],
)
def test_filters(template: str, value: Any) -> None:
    assert render(template, x={"a": "<é>'\""}, name="O'Brien") == value


def test_tojson_of_dates_and_of_unknown_names() -> None:
    assert render("{{ d | tojson }}", d=datetime(2024, 1, 31)) == '"2024-01-31T00:00:00"'
    with pytest.raises(UndefinedNameError):
        render("{{ nope | tojson }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ nope | default('x') }}",
        "{{ nope.deeper.still | default('x') }}",
        "{{ known.nope.deeper | default('x') }}",
        "{{ known.none.deeper | default('x') }}",
        "{{ 'x' if nope is not defined }}",
        "{{ 'x' if not nope }}",
        "{{ 'x' if not nope.deeper }}",
        "{{ 'x' if not (nope and nope.a == 1) }}",
        "{{ nope or 'x' }}",
    ],
)
def test_undefined_is_false_where_it_is_tested(template: str) -> None:
    assert render(template, known={"none": None}) == "x"


@pytest.mark.parametrize(
    "template",
    [
        "{{ nope }}",
        "{{ nope.deeper }}",
        "a {{ nope }}",
        "{{ nope == 1 }}",
        "{{ nope + 1 }}",
        "{{ nope | int }}",
        "{{ nope | length }}",
        "{% for x in nope %}{% endfor %}",
        "{{ known.nope }}",
        "{{ known.nope > 3 }}",
    ],
)
def test_undefined_is_an_error_where_its_value_is_needed(template: str) -> None:
    with pytest.raises(UndefinedNameError) as raised:
        render(template, known={"a": 1})
    message = str(raised.value)
    assert template.split("%}")[0].strip("{} %")[:4] in message
    assert "'nope'" in message
    assert "known names: known" in message


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ order.totl }}", "'totl' is undefined: the value has the keys total; did you mean 'total'?"),
        ("{{ order.totl + 1 }}", "'totl' is undefined: the value has the keys total; did you mean 'total'?"),
        ("a {{ step.nope }}", "'nope' is undefined: the result has the keys rows; "),
        ("{{ step.rows.nope }}", "'nope' is undefined: the value is a list; "),
        ("{{ text.nope }}", "'nope' is undefined: the result is the text 'hello'; "),
        ("{{ text.nope() }}", "'nope' is undefined: the value is the text 'hello'; "),
        ("{{ empty.nope }}", "'nope' is undefined: the value is empty; "),
        ("{{ ordr.total }}", "'ordr' is undefined; known names: empty, order, step, text; did you mean 'order'?"),
    ],
)
def test_what_lacks_a_name_is_said(template: str, reason: str) -> None:
    step, text = (ResultView({"status": "ok", "data": data}, ReferenceCache()) for data in ({"rows": [1]}, "hello"))
    with pytest.raises(UndefinedNameError, match=re.escape(reason)):
        render(template, order={"total": 1}, empty={}, step=step, text=text)


def test_an_inline_if_without_else_gives_nothing() -> None:
    assert render("{{ 1 if false }}") is None
    assert render("a{{ 1 if false }}") == "a"


def test_errors_inside_templates_name_the_template() -> None:
    with pytest.raises(TemplateError, match=r"'\{\{ 1 / zero \}\}': ZeroDivisionError"):
        render("{{ 1 / zero }}", zero=0)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ a", "end of print statement|unexpected end"),
        ("{{ a | nope }}", "no filter is called 'nope'"),
        ("{{ a is nope }}", "no test is called 'nope'"),
        ("{% if a %}", "does not parse"),
        ("line one\n{{ a b }}", "line 2 of the text"),
    ],
)
def test_syntax_errors_show_when_compiled(template: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        compile_value(template)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ f.__globals__ }}",
        "{{ f.__code__.co_code }}",
        "{{ items.append(1) }}",
        "{{ mapping.update({'a': 2}) }}",
        "{{ '{0.__class__}'.format(items) }}",
        "{{ range(10000000) }}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    items: list[int] = []
    mapping = {"a": 1}
    function: Callable[[], None] = lambda: None  # noqa: E731
    with pytest.raises(TemplateError):
        render(attack, f=function, items=items, mapping=mapping)
    assert items == []
    assert mapping == {"a": 1}


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (True, True),
        (False, False),
        ("false", False),
        ("False", False),
        (" FALSE ", False),
        ("0", False),
        ("no", False),
        ("None", False),
        ("", False),
        ("yes", True),
        ("anything", True),
        (0, False),
        (2, True),
        ([], False),
        ([0], True),
        (None, False),
        ({}, False),
    ],
)
def test_truth_of_a_when(value: Any, truth: bool) -> None:
    assert is_true(value) is truth
    assert condition("{{ x }}").holds({"x": value}) is truth


def test_conditions() -> None:
    assert condition(None).holds({})
    assert condition(True).holds({})
    assert not condition(False).holds({})
    assert condition("{{ a == 1 and b is not defined }}").holds({"a": 1})
    assert not condition("{{ a }} ").holds({"a": "False"})
    assert condition("{{ a.b }}").names == {"a"}
    assert condition(True) is not condition("True")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("when", "is_said", "is_said_if_strict"),
    [
        ("{{ nope == 1 }}", True, True),
        ("{{ nope }}", True, True),
        ("{{ a.nope.deeper }}", True, True),
        ("{{ a and a.nope }}", True, True),
        ("{{ not nope and nope }}", True, True),
        ("{{ nope and nope.deeper > 1 }}", False, True),
        ("{{ a and a.nope and a.nope.deeper }}", False, True),
        ("{{ nope or false }}", False, True),
        ("{{ true if nope else false }}", False, True),
        ("{{ nope is none }}", False, True),
        ("{{ nope is defined }}", False, False),
        ("{{ nope is defined and nope.deeper }}", False, False),
        ("{{ nope | default(false) }}", False, False),
        ("{{ error }}", False, False),
        ("{{ error and error.kind == 'timeout' }}", False, False),
        ("{{ a.http or false }}", False, False),
        ("{{ a.null.deeper }}", False, False),
    ],
)
def test_a_false_condition_says_which_name_is_undefined(
    when: str, is_said: bool, is_said_if_strict: bool, strict: bool
) -> None:
    compiled = condition(when, strict=strict)
    assert compiled.is_strict is strict
    if is_said_if_strict if strict else is_said:
        with pytest.raises(UndefinedNameError, match="'nope' is undefined"):
            compiled.holds({"a": {"b": 1, "null": None}})
    else:
        assert not compiled.holds({"a": {"b": 1, "null": None}})


NAMES = st.text("abcxyz", min_size=1, max_size=4).filter(lambda name: name not in ("or", "is", "in", "if"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(NAMES, JSON)
def test_any_value_passes_through_unchanged(name: str, value: Any) -> None:
    assert compile_value(f"{{{{ {name} }}}}").render({name: value}) == value
    assert json.loads(compile_value(f"{{{{ {name} | tojson }}}}").render({name: value})) == value


@given(st.text(max_size=40))
def test_any_text_compiles_or_is_refused_with_its_own_error(text: str) -> None:
    try:
        compiled = compile_value("{{" + text)
        compiled.render({})
    except TemplateError:
        pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (0.5, "0.5"),
        ("a/b", "a/b"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        ([1, None], "[1,null]"),
        ({"a": True}, '{"a":true}'),
        ("", ""),
    ],
)
def test_a_value_in_a_text_that_is_sent_is_spelled_as_one_beside_it(value: Any, text: str) -> None:
    fields = {
        "url": "http://host/{{ value }}?{% if value %}v={{ value }}{% endif %}&w={{ view.x }}",
        "n": "{{ value }}",
    }
    compiled = compile_fields(fields, (), ("url",))
    view = ResultView({"status": "ok", "data": {"x": True}}, ReferenceCache())

    rendered = compiled.render({"value": value, "view": view})

    assert rendered == {"url": f"http://host/{text}?{f'v={text}' if value else ''}&w=true", "n": value}


def test_null_in_a_text_that_is_sent_is_refused() -> None:
    for field in ("http://host/{{ value }}", "{{ value }}/x"):
        with pytest.raises(
            TemplateError, match=re.escape(f"{field}': ValueError: a value in a text that is sent is null")
        ):
            compile_value(field, sent=True).render({"value": None})
    with pytest.raises(UndefinedNameError, match="'value' is undefined"):
        compile_value("http://host/{{ value }}", sent=True).render({})
    assert compile_value("{{ value }}", sent=True).render({"value": None}) is None
