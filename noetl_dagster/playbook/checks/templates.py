"""Checks templates and Python code before anything runs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator

from noetl_dagster.errors import ERROR_KINDS, Place, Problem, ProblemKind, TemplateError
from noetl_dagster.playbook.code import (
    compile_python,
    expressions_in,
    templates_in_texts,
    without_expressions,
)
from noetl_dagster.playbook.document import Document, texts_in
from noetl_dagster.playbook.models import ARC_WORDS, Input, Playbook
from noetl_dagster.playbook.templates.rendering import BRACES_REMEDY, Compiled, compile_value, condition
from noetl_dagster.playbook.templates.scope import RESULT_SUFFIX
from noetl_dagster.playbook.tool_kinds import DESCRIPTION, LITERAL_FIELDS, TOOL_KINDS, WHEN
from noetl_dagster.playbook.wording import Hints, hints_against, is_template, listed, suggestion

_KINDS = ("python", "spark")
_DATA_NAMES = frozenset({"workload", "ctx", "iter", "keychain", "execution_id"})


def check_code(playbook: Playbook, document: Document | None = None) -> Iterator[Problem]:
    """Finds mistakes in ``code``, each at its own line and column of the file: syntax, templates and their names.

    Args:
        document: the YAML behind the playbook; read again from its source when not given.
    """
    tasks = [task for step in playbook.steps for task in step.tasks]
    tasks += playbook.workbook.values()
    codes = {str(task.config.get("code")) for task in tasks if task.kind in _KINDS}
    document = document or Document(playbook.source, playbook.file)
    lines = playbook.source.splitlines()
    names = known_names(playbook)
    hints = hints_against(tuple(sorted(names)), "")
    data_names = _DATA_NAMES.union(playbook.workload, (step.name for step in playbook.steps))
    for owner, name, label, code in texts_in([document.root], 0):
        if label != "code" or code not in codes:
            continue
        place = document.place(owner, name)
        yield from _compiled(code, place, lines)
        expressions = expressions_in(code)
        if len(expressions) == 1 and expressions[0].source == code.strip():
            message = "code: all of it is one template, whose value does nothing; write the code itself or a script"
            yield Problem(place, message, "warning", ProblemKind.CODE_IS_TEMPLATE)
        for expression in expressions:
            where = place_of_line(expression.line, expression.column, code, place, lines)
            yield from check_text(where, "code", expression.source, names, hints)
        for template in templates_in_texts(code):  # values of the playbook are not rendered there
            try:
                named = sorted(compile_value(template.source).names & data_names)
            except TemplateError:
                continue
            if named:
                where = place_of_line(template.line, template.column, code, place, lines)
                remedy = f"take the quotes away, or hand {named[0]!r} over with input"
                message = f"code: {template.source} in a string literal of Python is not rendered; {remedy}"
                yield Problem(where, message, "warning", ProblemKind.TEMPLATE_IN_TEXT)


def _compiled(code: str, place: Place, lines: list[str]) -> Iterator[Problem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings and the like
            compile_python(without_expressions(code, expressions_in(code)), "<code>")
    except SyntaxError as error:
        where = place_of_line(error.lineno or 1, error.offset or 1, code, place, lines)
        message = f"code: {error.msg}; Python cannot compile this line"
        yield Problem(where, message, kind=ProblemKind.PYTHON_SYNTAX)
    except ValueError as error:  # a null character
        yield Problem(place, f"code: {error}", kind=ProblemKind.PYTHON_SYNTAX)


def place_of_line(number: int, column: int, code: str, place: Place, lines: list[str]) -> Place:
    """Returns the place of a line of code: in a block scalar below its ``|``, else in the same line."""
    code_lines = code.splitlines()
    wanted = code_lines[number - 1] if number <= len(code_lines) else ""
    start = lines[place.line - 1][place.column - 1 :]
    line = place.line + number if start.startswith("|") else place.line + number - 1
    column_at = lines[line - 1].find(wanted) if line <= len(lines) else -1
    if column_at < 0:  # folded or escaped: the lines of the file are not those of the code
        return place
    return Place(place.file, line, column_at + column)


SKIPPED_KEYS = frozenset({*LITERAL_FIELDS, *DESCRIPTION, "libs"})
_TEST = (
    r"""\b%s\s*(?:\.\s*%s|\[\s*['"]%s['"]\s*\])\s*(?:[=!]=|(?:not\s+)?in\b)"""
    r"""\s*(\[[^\]]*\]|\([^)]*\)|'[^']*'|"[^"]*")"""
)
_KIND_TEST = re.compile(_TEST % ("error", "kind", "kind"))
_EVENT_TEST = re.compile(_TEST % ("event", "name", "name"))
_QUOTED = re.compile(r"""['"]([^'"]*)['"]""")
_CONDITION_KEYS = frozenset(WHEN)
_WARNINGS = 20  # for one text
_SHOWN_PARTS = 5
_SETTING_AS_SECRET = re.compile(r"secret://env(?:ironment)?/NOETL_\w*")
LANGUAGE_NAMES = frozenset(
    {
        *("workload", "ctx", "vars", "iter", "loop", "_index", "loop_index", "execution_id", "job", "keychain"),
        *("input", "step", "results", "output", "outcome", "response", "error", "event", "partition"),
        *("asset", "fanin", "result", "data", "this", "meta", "args", "path", "params", "status"),
        *("status_code", "attempt", "_prev", "_task", "_attempt", "_retry", "_page", "_rows", "__frame_max_rows"),
    }
)
"""Names that the language itself defines somewhere."""


def check_templates(playbook: Playbook, document: Document) -> Iterator[Problem]:
    """Walks every text of the workflow and the workbook."""
    names = known_names(playbook)
    root = document.root
    if not isinstance(root, dict):
        return
    hints = hints_against(tuple(sorted(names)), "")
    lines = playbook.source.splitlines()
    for section in ("workflow", "workbook", "executor"):
        for owner, name, key, text in texts_in(root, section, SKIPPED_KEYS - LITERAL_FIELDS):
            if name in LITERAL_FIELDS and not document.is_command(text):
                continue
            if setting := _SETTING_AS_SECRET.search(text):
                message = f"{key}: {setting[0]} is a setting of the platform, which playbooks cannot read"
                yield Problem(document.place(owner, name), message)
            if "{" in text and document.is_command(text):
                yield from _check_command(document.place(owner, name), key, text, names, hints, lines)
            elif "{" in text or key in _CONDITION_KEYS:
                yield from check_text(document.place(owner, name), key, text, names, hints)


def _check_command(
    place: Place, key: str, text: str, names: frozenset[str], hints: Hints, lines: list[str]
) -> Iterator[Problem]:
    """Checks a text of a command, and warns about each line with braces of another program."""
    yield from check_text(place, key, text, names, hints, command=True)
    try:
        foreign = compile_value(text, command=True).foreign
    except TemplateError:
        return
    by_line: dict[int, list[str]] = {}
    for part in foreign:
        by_line.setdefault(part.line, []).append(part.source)
    for line, parts in list(by_line.items())[:_WARNINGS]:
        shown = tuple(dict.fromkeys(parts))
        verb = "is no template and stays as it is" if len(shown) == 1 else "are no templates and stay as they are"
        message = f"{key}: {listed(shown, _SHOWN_PARTS)} {verb}; {BRACES_REMEDY}"
        where = place_of_line(line, 1, text, place, lines)
        yield Problem(where, message, "warning", ProblemKind.FOREIGN_BRACES)


def known_names(playbook: Playbook) -> frozenset[str]:
    """Returns every name that the playbook defines, wherever it is visible."""
    tasks = [*playbook.workbook.values(), *(task for step in playbook.steps for task in step.tasks)]
    steps = {step.name for step in playbook.steps}
    results = {f"{name}{RESULT_SUFFIX}" for name in (*steps, *(task.name for task in tasks))}
    return own_names(playbook) | LANGUAGE_NAMES | steps | results


def own_names(playbook: Playbook) -> frozenset[str]:
    """Returns the names that the playbook defines beside those of its steps."""
    names = {*playbook.workload, *playbook.workbook}
    tasks = [*playbook.workbook.values()]
    targets: list[str] = []
    for step in playbook.steps:
        names |= {*_names_of(step.input), *step.sources}
        if step.state is not None:
            names.add("state")
        if step.loop is not None:
            names |= {step.loop.iterator, "item"}
        targets += [*step.set, *(target for arc in step.routing.arcs for target in arc.set)]
        tasks += step.tasks
    for task in tasks:
        names |= {task.name, *_names_of(task.input)}
        targets += [*task.set, *(target for rule in task.spec.policy for target in rule.then.set)]
    return frozenset(names.union(*(target.split(".")[:2] for target in targets)))


def _names_of(input: Input) -> Iterable[str]:
    return () if isinstance(input, str) else input


def check_text(
    place: Place, key: str, text: str, names: frozenset[str], hints: Hints, *, command: bool = False
) -> Iterator[Problem]:
    """Checks that a template parses, and that its names are known."""
    try:
        compiled = compile_value(text, command=command)
    except TemplateError as error:
        yield Problem(place, f"{key}: {error}", kind=ProblemKind.TEMPLATE_SYNTAX)
        return
    for name in sorted(compiled.names - names):
        near = hints(name)
        hint = near if near.startswith("did you") else "it must come with the workload of the execution"
        message = f"{key}: nothing in the playbook defines {name!r}; {hint}"
        yield Problem(place, message, "warning", ProblemKind.UNDEFINED_NAME)
    yield from _check_comparisons(place, key, text)
    if key in _CONDITION_KEYS:
        yield from _check_condition(place, key, text, compiled)


def _check_comparisons(place: Place, key: str, text: str) -> Iterator[Problem]:
    """Finds ``error.kind`` compared with a tool, and ``event.name`` with an event that no arc ever sees."""
    for word in _compared(_KIND_TEST, text):
        # it holds, but a kind of error is what the next reader expects
        if word not in ERROR_KINDS and word in TOOL_KINDS:
            meaning = f"error.kind says what went wrong ({', '.join(ERROR_KINDS[:4])}, ...)"
            message = f"{key}: {meaning}, and {word!r} is a tool; write error.source == {word!r}"
            yield Problem(place, message, "warning", ProblemKind.TOOL_AS_ERROR_KIND)
    for word in _compared(_EVENT_TEST, text):
        if word not in ARC_WORDS and not is_template(word):
            hint = suggestion(word, ARC_WORDS, "names of events")
            message = f"{key}: event.name is never {word!r}; {hint}"
            yield Problem(place, message, "warning", ProblemKind.UNDEFINED_NAME)


def _compared(test: re.Pattern[str], text: str) -> Iterable[str]:
    return dict.fromkeys(word for comparison in test.findall(text) for word in _QUOTED.findall(comparison))


def _check_condition(place: Place, key: str, text: str, compiled: Compiled) -> Iterator[Problem]:
    """Conditions that are always true because they are text: no template, or one with text around it."""
    if compiled.constant and condition(text).holds({}):
        message = f"{key}: {text!r} holds no template and is always true; write {{{{ ... }}}}"
        yield Problem(place, message, "warning", ProblemKind.CONSTANT_CONDITION)
    elif not compiled.constant and not compiled.is_expression and "{%" not in text:
        remedy = "put the whole condition into {{ }}"
        message = f"{key}: text around a template is true whatever it says; {remedy}"
        yield Problem(place, message, "warning", ProblemKind.CONSTANT_CONDITION)
