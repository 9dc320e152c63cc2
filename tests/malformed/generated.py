"""Damaged playbooks, odd values and attacks for the loader and the templates, each reproducible by its number."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.templates.rendering import compile_value
from tests.playbook.playbooks import HEAD

ROOT = Path(__file__).parents[2]

SCALARS = (
    *("null", "~", "true", "on", "yes", "017", "0x1F", "0o17", "1:30", "1:30:00", "1_000", "-0", "+1", ".5", "1e400"),
    *("-1e400", ".inf", "-.inf", ".nan", "1e-400", "9" * 30, "9" * 390, "0x" + "f" * 300, "-" + "9" * 350, "2024-02-30"),
    *("2026-01-01T00:00:00Z", "24:00", "!!binary aGk=", "!!binary é", "!!set {a}", "!!omap [a: 1]", "!!str 1", "!!int x"),
    *("!!float x", "!!bool x", "!!null x", "!!map x", "!!seq x", "!!python/object:os.system x", "!x y", "*a", "&a x", "<<"),
    *('"\\0"', '"\\ud800"', '"\\U0010ffff"', "'{{ a }}'", "'{{ a'", "'{% if %}'", "'{# x'", "[]", "{}", "[[[]]]", "{a: {b: 1}}"),
    *("''", "'\u202e'", "'@'", "'s3://b/../..'", "'${x}'", "'a\\\\b'", "-1", "0", "1", "5s", "'1e9d'", "999999999999d", "P1D"),
    *("'* * * * *'", "'0 0 31 2 *'", "'*/0 * * * *'", "'99 99 * * *'", "Europe/Nowhere", "a/b/c", "a.b.c", "@latest"),
)  # fmt: skip
ATOMS = (
    *("1", "0", "-1", "1.5", "'x'", "a", "workload", "workload.n", "workload.rows", "ctx.x", "none", "true", "[]", "{}", "()"),
    *("range(9)", "'%s'", "'{}'", "'%9999999999d'", "99999999999", "1e308", "'\\\\'", "loop", "dict()", "namespace(x=1)"),
    *("cycler(1, 2)", "joiner(',')", "self", "caller", "varargs", "_", "''.format", "[1, 2, 3]", "{'a': 1}"),
)  # fmt: skip
FOREIGN = (
    *("{{.Names}}", "{{json .}}", "{{range .x}}", "{{end}}", "{{`", "{{", "}}", "{%", "%}", "{#", "#}", "${#a}", "{%s}", "'"),
    *("{% raw %}", "{% endraw %}", "{{1,2},{3,4}}", "{", "}", '"', " ", "\n"),
)  # fmt: skip
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is", "|", ".")
FILTERS = (
    *("abs", "batch(3)", "batch(9999999999, 'x')", "capitalize", "center(99999999999)", "count", "default(1)", "dictsort"),
    *("e", "filesizeformat", "first", "float", "format(1)", "groupby('a')", "indent(999999999)", "int", "int(base=99)"),
    *("items", "join('x')", "last", "list", "lower", "map('upper')", "map(attribute='a')", "max", "min", "pprint", "random"),
    *("reject", "replace('', 'xx')", "reverse", "round(99999)", "round(-99999)", "safe", "select", "slice(999999999)", "sort"),
    *("string", "striptags", "sum", "sum(start=[])", "title", "tojson", "tojson(indent=9999999)", "trim", "truncate(-5)"),
    *("unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(1)", "wordwrap(0)", "wordwrap(-1)", "xmlattr"),
    *("from_json", "b64encode", "b64decode", "sql_literal", "sql_list", "sql_identifier", "shell_quote", "path_part", "attr('x')"),
)  # fmt: skip
METHODS = (
    "upper()",
    "center(9999999999)",
    "format(1)",
    "split('')",
    "join([])",
    "items()",
    "get('a')",
    "zfill(999999999)",
)
NAMED = (
    "workload",
    "workflow",
    "next",
    "tool",
    "spec",
    "loop",
    "input",
    "when",
    "set",
    "retry",
    "sink",
    "kind",
    "code",
)


def corpus() -> list[str]:
    """Returns the playbooks of the repository."""
    files = sorted(
        file for folder in ("tests/corpus", "playbooks", "examples") for file in (ROOT / folder).rglob("*.yaml")
    )
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def expression(dice: random.Random, depth: int = 0) -> str:
    """Makes an expression of Jinja, mostly a valid one."""
    if depth > dice.randint(0, 6):
        return dice.choice(ATOMS)
    inner = expression(dice, depth + 1)
    match dice.randrange(9):
        case 0 | 1:
            return f"{inner} {dice.choice(OPERATORS)} {expression(dice, depth + 1)}"
        case 2 | 3:
            return f"({inner}) | {dice.choice(FILTERS)}"
        case 4:
            return f"({inner}).{dice.choice(METHODS)}"
        case 5:
            return f"[{inner}, {expression(dice, depth + 1)}]"
        case 6:
            return f"({inner} if {expression(dice, depth + 1)} else {dice.choice(ATOMS)})"
        case 7:
            return f"({inner})[{expression(dice, depth + 1)}:]"
    return f"({inner}) * {dice.choice(('2', '1000', '99999999999'))}"


def template(dice: random.Random) -> str:
    """Makes a template: an expression, or one with loops, variables and macros."""
    value = expression(dice)
    match dice.randrange(8):
        case 0:
            return f"{{% for x in {value} %}}{{{{ {expression(dice)} }}}}{{% endfor %}}"
        case 1:
            return (
                f"{{% set a = {value} %}}" + f"{{% set a = {dice.choice(('[a, a]', 'a + a', 'a ~ a', 'a * 3'))} %}}" * 3
            )
        case 2:
            return f"{{% macro m(a) %}}{{{{ m({value}) }}}}{{% endmacro %}}{{{{ m(1) }}}}"
        case 3:
            return f"{'(' * (many := dice.randrange(200))}{value}{')' * many}".join(("{{ ", " }}"))
        case 4:
            return "{% if " + value + " %}x{% endif %}" * dice.randrange(40)
        case 5:
            return "".join(dice.choices((*FOREIGN, f"{{{{ {value} }}}}"), k=dice.choice((3, 30, 3000))))
    return f"{{{{ {value} }}}}"


def nested(dice: random.Random) -> str:
    """Makes a structure that is nested, repeated or shared."""
    times = dice.choice((3, 30, 90, 300, 3000))
    match dice.randrange(6):
        case 0:
            return "[" * times + "]" * times
        case 1:
            return "{a: " * times + "1" + "}" * times
        case 2:
            lines = [f"&a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, min(times, 60))]
            return "[&a0 x, " + ", ".join(lines) + "]"
        case 3:
            lines = [f"&m{n} {{<<: *m{n - 1}, k{n}: *m{n - 1}}}" for n in range(1, min(times, 60))]
            return "[&m0 {x: 1}, " + ", ".join(lines) + "]"
        case 4:
            return "&r [*r, {<<: *r}]"
    return "[" + ", ".join(dice.choice(SCALARS) for _ in range(times)) + "]"


def quoted(text: str) -> str:
    """Quotes a text for YAML."""
    return "'" + text.replace("'", "''") + "'"


def odd(dice: random.Random) -> str:
    """Makes a value that few playbooks have."""
    match dice.randrange(5):
        case 0 | 1:
            return dice.choice(SCALARS)
        case 2:
            return nested(dice)
    return quoted(template(dice))


def damaged(dice: random.Random, texts: list[str]) -> str:
    """Takes a playbook and changes some of its lines or characters."""
    lines = dice.choice(texts).splitlines()
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        match dice.randrange(7):
            case 0 | 1 | 2 if colon:
                lines[at] = f"{key}: {odd(dice)}"
            case 3:
                lines.insert(at, lines[dice.randrange(len(lines))])
            case 4 if len(lines) > 1:
                del lines[at]
            case 5:
                cut = dice.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:cut] + dice.choice("{}[]:,&*!|>'\"%@`#-?\t\0\x85\ufeff ") + lines[at][cut:]
            case _:
                indent = len(lines[at]) - len(lines[at].lstrip())
                lines.insert(at, " " * indent + f"{dice.choice(NAMED)}: {odd(dice)}")
    return "\n".join(lines)


def text_of(seed: int, texts: list[str]) -> str:
    """Returns the text with a number."""
    dice = random.Random(seed)
    match dice.randrange(8):
        case 0:
            return (
                HEAD
                + f"workload: {nested(dice)}\nworkflow: [{{step: a, tool: {{kind: noop}}, input: {nested(dice)}}}]\n"
            )
        case 1:
            keys = "".join(f"  {dice.choice(NAMED)}: {odd(dice)}\n" for _ in range(5))
            return HEAD + f"workload: {{n: {dice.choice(SCALARS)}}}\nworkflow:\n- step: start\n{keys}"
        case 2:
            names = (
                "timeout",
                "loop_mode",
                "max_attempts",
                "max_in_flight",
                "priority",
                "weight",
                "isolation",
                "memory",
            )
            spec = "".join(f"    {name}: {odd(dice)}\n" for name in dice.sample(names, 4))
            return HEAD + f"workload: {{n: 3}}\nworkflow:\n- step: start\n  tool: {{kind: noop}}\n  spec:\n{spec}"
    return damaged(dice, texts)


def check(seed: int, texts: list[str]) -> None:
    """Loads a text, and renders a template; every other outcome than a playbook, problems or TemplateError is raised."""
    text = text_of(seed, texts)
    playbook, problems = parse_report(text, file="x.yaml", code=True)
    assert (playbook is None) == any(problem.severity == "error" for problem in problems)
    assert all(problem.place.line >= 1 and str(problem) for problem in problems)
    if playbook is not None and playbook.settled:
        parse_report(text, workload={"n": 10**6})
    scope = {"workload": {"n": 3, "rows": [{"a": 1}, {"a": "x"}]}, "a": 2}
    for command in (False, True):
        with suppress(TemplateError):
            compile_value(template(random.Random(seed)), command=command).render(scope)
