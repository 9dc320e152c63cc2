"""Braces of other programs stay as they are, and templates beside them are rendered."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.errors import TemplateError, UndefinedNameError
from noetl_dagster.playbook.templates.reading import outputs_in
from noetl_dagster.playbook.templates.rendering import compile_value

NAMES = {"name": "web", "end": "END", "x": {"b": 1}}

# of a command: the text, what it renders to (empty: the same), and the parts that belong to another program
COMMANDS: list[tuple[str, str, list[str]]] = [
    ("docker ps --format '{{.Names}}'", "", ["{{.Names}}"]),
    ("docker ps --format '{{.Names}}' -f name={{ name }}", "docker ps --format '{{.Names}}' -f name=web", ["{{.Names}}"]),
    ("{{ name }}: {{json .}} {{ index .Items 0 }}", "web: {{json .}} {{ index .Items 0 }}", ["{{json .}}", "{{ index .Items 0 }}"]),
    ("{{printf \"%s\" .x}}{{- .y -}} {{$v := 1}}", "", ['{{printf "%s" .x}}', "{{- .y -}}", "{{$v := 1}}"]),
    ("{{`{{ .Name }}`}} {{ name }}", "{{`{{ .Name }}`}} web", ["{{`{{ .Name }}"]),
    # a template inside of foreign braces
    ('{{index .Ports "{{ name }}/tcp"}}', '{{index .Ports "web/tcp"}}', ['{{index .Ports "{{ name }}']),
    ("{{{ name }}}", "", ["{{{ name }}"]),
    ("{{{{ name }}}}", "{{web}}", ["{{{{ name }}"]),
    # words of Go are names outside of its blocks
    ("{{range .a}}{{if .b}}1{{else}}2{{end}}{{end}} {{ end }}", "{{range .a}}{{if .b}}1{{else}}2{{end}}{{end}} END",
     ["{{range .a}}", "{{if .b}}", "{{else}}", "{{end}}", "{{end}}"]),
    ('{{define "t"}}{{ name }}{{ end }}{{ end }}', '{{define "t"}}web{{ end }}END', ['{{define "t"}}', "{{ end }}"]),
    ('{{range .a}}{{.n}}{{"\\n"}}{{break}}{{end}}', "{{range .a}}{{.n}}\n{{break}}{{end}}",
     ["{{range .a}}", "{{.n}}", "{{break}}", "{{end}}"]),
    # shells, awk, printf, JSON, Liquid
    ("echo ${#name} ${#a[${i}]} {{ name }} #}", "echo ${#name} ${#a[${i}]} web #}", ["${#name}", "${#a[${i}"]),
    ("awk '{#count}' {{ name }}", "awk '{#count}' web", ["{#count}"]),
    ("awk 'BEGIN {{print $1}}' # {{ name }}", "awk 'BEGIN {{print $1}}' # web", ["{{print $1}}"]),
    ("printf '{%s} {%-5d}\\n' {{ name }}", "printf '{%s} {%-5d}\\n' web", ["{%s}", "{%-5d}"]),
    ("{% assign a = 1 %}{% if x %}{{ name }}{% endif %}", "{% assign a = 1 %}web", ["{% assign a = 1 %}"]),
    ("{%if} {{ name }}", "{%if} web", ["{%if}"]),
    ("curl -d '{{\"a\": 1}}' {{ name }}", "curl -d '{{\"a\": 1}}' web", ['{{"a": 1}}']),
    ("a{{b,c},{d,e}} {} {{}} {{ }}", "", ["{{b,c},{d,e}}", "{{}}", "{{ }}"]),
    ("-o jsonpath='{.items[*].metadata.name}' {{ name }}", "-o jsonpath='{.items[*].metadata.name}' web", []),
    ("{{ name }", "", ["{{ name }"]),
    ("{{ name", "", ["{{ name"]),
    ("a\r\n{{.x}}\n", "", ["{{.x}}"]),  # without a template not even the ends of lines change
    # valid templates are as in any other text
    ("{{ name | upper }} {{ '{{' }}.Names{{ \"}}\" }} {{ {'a': {'b': 1}}['a'] }}", "WEB {{.Names}} {'b': 1}", []),
    ("{{ '}}' }}{{.x}}{{ {'a': {'b': name}} }}", "}}{{.x}}{'a': {'b': 'web'}}", ["{{.x}}"]),
    ("{# {{.x}} {% no %} #}{{.y}}", "{{.y}}", ["{{.y}}"]),
    ("{% set a = '{{.x}}' %}{{ a }}{{.y}}", "{{.x}}{{.y}}", ["{{.y}}"]),
    # raw
    ("{% raw %}{{ name }} {{.x}} ${#x} {% no %}{% endraw %} {{ name }}", "{{ name }} {{.x}} ${#x} {% no %} web", []),
    ("{%- raw -%} {{ a $ }} {%- endraw -%} {{b $}}{{ name }}", "{{ a $ }}{{b $}}web", ["{{b $}}"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rendered", "parts"), COMMANDS)
def test_braces_of_other_programs_in_a_command(text: str, rendered: str, parts: list[str]) -> None:
    compiled = compile_value(text, command=True)
    assert compiled.render(NAMES) == (rendered or text)
    assert [part.source for part in compiled.foreign] == parts
    assert compile_value(["run", {"ARG": text}], command=True).render(NAMES) == ["run", {"ARG": rendered or text}]


@pytest.mark.parametrize("value", [3, None, {"a": [1]}])
def test_one_expression_of_a_command_keeps_its_type(value: Any) -> None:
    assert compile_value("{{ v }}", command=True).render({"v": value}) is value
    assert compile_value("\n {{ v | default(1) }}\n", command=True).render({"v": value}) == value


# shapes that are never Jinja, in any text
@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("VALUES ('{{1,2},{3,4}}', {{ name }})", "VALUES ('{{1,2},{3,4}}', web)"),
        ("{{.x}} {{ '{{.y}}' }}{{range .a}}{{end}}{{ end }}", "{{.x}} {{.y}}{{range .a}}{{end}}END"),
        ("{% raw %}{{.x}} {{ name }}{% endraw %}{{.y}}", "{{.x}} {{ name }}{{.y}}"),
        ("{# {{.x}} #}${#x} {# y #}", "${#x} "),
    ],
)
def test_shapes_of_other_programs_in_any_text(text: str, rendered: str) -> None:
    assert compile_value(text).render(NAMES) == rendered


@pytest.mark.parametrize(
    "text", ["{{ json . }}", "{{ a | }}", "{{.x}} {{ a", "{%s}", "{# x", "{% assign a = 1 %}", "{{print $1}}"]
)
def test_other_texts_must_parse(text: str) -> None:
    with pytest.raises(TemplateError, match="does not parse"):
        compile_value(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% if a %}{{.x}}", "Unexpected end of template"),
        ("{% endfor %}{{.x}}", "unknown tag 'endfor'"),
        ("{% if a = 1 %}{% endif %}", "expected token 'end of statement block'"),
        ("{% raw %}{{.x}}", "end of raw directive"),
        ("{{ a | shell_quot }} {{.x}}", "no filter is called 'shell_quot'"),
    ],
)
def test_a_wrong_template_in_a_command_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as refused:
        compile_value(text, command=True)
    assert "write {% raw %} and {% endraw %} around what another program reads" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ json . }}{{ " + "[" * 101 + "]" * 101 + " }}", "nested too deep"),
        ("{{ json . }}{{ a" + ".b" * 200 + " }}", "nested deeper than 100 levels"),
        ("{{ json . }}\n" * 201, "line 201 of the text: more than 200 parts are no templates"),
    ],
)
def test_a_limit_is_no_brace_of_another_program(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        compile_value(text, command=True)


def test_unknown_names_of_a_command_are_errors() -> None:
    compiled = compile_value("{{.x}} {{ Names }}", command=True)
    assert compiled.names == {"Names"}
    with pytest.raises(UndefinedNameError, match="'Names' is undefined"):
        compiled.render(NAMES)


def test_parts_know_their_lines() -> None:
    compiled = compile_value("a\n{{.x}} {{ name }}\n\n${#y} {{ json . }}", command=True)
    assert [(part.line, part.source) for part in compiled.foreign] == [(2, "{{.x}}"), (4, "${#y}"), (4, "{{ json . }}")]
    [output] = outputs_in("\n\n{{ name }}\n")
    assert output.line == 3


def test_the_checks_see_templates_beside_foreign_braces() -> None:
    text = "{{ json . }} '{{.x}} {{ chunk.rows }}' {{ chunk.size | default(1) }}"
    outputs = outputs_in(text, command=True)
    assert [output.source for output in outputs] == ["{{ chunk.rows }}", "{{ chunk.size | default(1) }}"]
    assert outputs[0].before == "{{ json . }} '{{.x}} "


PIECES = (*("{{", "}}", "{%", "%}", "{#", "#}", "{", "}", "${#", "'", '"', "`"), *" \n-.$|a1", "if", "end", "1,2")
WHOLE = ("{% raw %}", "{% endraw %}", "{{ name }}", "{{.x}}", "{{range .x}}", "{{end}}", "{% if name %}", "{% endif %}")


@given(st.lists(st.sampled_from(PIECES + WHOLE), max_size=20).map("".join))
def test_any_text_of_a_command_is_read(text: str) -> None:
    may_fail = "{%" in text or "| a" in text or "|a" in text  # a tag without its end, or an unknown filter
    compiled = None
    with suppress(TemplateError) if may_fail else nullcontext():
        compiled = compile_value(text, command=True)
        if compiled.foreign and compiled.constant:
            assert compiled.render({}) == text
    with suppress(TemplateError):
        alone = compile_value(text)
        assert compiled is not None
        assert (compiled.constant, compiled.names, compiled.foreign) == (alone.constant, alone.names, alone.foreign)
