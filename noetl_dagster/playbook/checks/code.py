"""Python code that does not compile, and templates in it, found without running it.

Loading does not ask for this: a step that is never reached may hold what it likes, and a failure at run time
can be routed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from noetl_dagster.errors import Place, Problem, ProblemKind, TemplateError
from noetl_dagster.playbook.checks.templates import check_text, known_names
from noetl_dagster.playbook.code import (
    compile_python,
    expressions_in,
    templates_in_texts,
    without_expressions,
)
from noetl_dagster.playbook.dialects.block import Hints
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.templates.rendering import compile_value

_KINDS = frozenset({"python", "spark"})
_DATA_NAMES = frozenset({"workload", "ctx", "iter", "keychain", "execution_id"})


def check_code(playbook: Playbook, document: Document | None = None) -> Iterator[Problem]:
    """What is wrong with ``code``, each at its own line and column of the file: syntax, templates and their names.

    Args:
        document: the YAML behind the playbook; read again from its source when not given.
    """
    tasks = [task for step in playbook.steps for task in step.tasks]
    tasks += playbook.workbook.values()
    codes = {task.config.get("code") for task in tasks if task.kind in _KINDS}
    document = document or Document(playbook.source, playbook.file)
    lines = playbook.source.splitlines()
    known = known_names(playbook)
    hints = Hints(sorted(known), "")
    data_names = _DATA_NAMES.union(playbook.workload, (step.name for step in playbook.steps))
    for place, code in _written(document, document.root):
        if code in codes:
            yield from _compiled(code, place, lines)
            expressions = expressions_in(code)
            if len(expressions) == 1 and expressions[0].source == code.strip():
                message = "code: all of it is one template, whose value does nothing; write the code itself or a script"
                yield Problem(place, message, "warning", ProblemKind.CODE_IS_TEMPLATE)
            for expression in expressions:
                where = _place_of(expression.line, expression.column, code, place, lines)
                yield from check_text(where, "code", expression.source, known, hints)
            yield from _texts(code, place, lines, data_names)


def _compiled(code: str, place: Place, lines: list[str]) -> Iterator[Problem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings and the like
            compile_python(without_expressions(code, expressions_in(code)), "<code>")
    except SyntaxError as error:
        where = _place_of(error.lineno or 1, error.offset or 1, code, place, lines)
        message = f"code: {error.msg}; Python cannot compile this line"
        yield Problem(where, message, kind=ProblemKind.PYTHON_SYNTAX)
    except ValueError as error:  # a null character
        yield Problem(place, f"code: {error}", kind=ProblemKind.PYTHON_SYNTAX)


def _texts(code: str, place: Place, lines: list[str], known: frozenset[str]) -> Iterator[Problem]:
    """Braces in string literals stay as they are, which who names a value of the playbook there did not mean."""
    for template in templates_in_texts(code):
        try:
            named = sorted(compile_value(template.source).names & known)
        except TemplateError:
            continue
        if named:
            where = _place_of(template.line, template.column, code, place, lines)
            remedy = f"take the quotes away, or hand {named[0]!r} over with input"
            message = f"code: {template.source} in a string literal of Python is not rendered; {remedy}"
            yield Problem(where, message, "warning", ProblemKind.TEMPLATE_IN_TEXT)


def _place_of(number: int, column: int, code: str, place: Place, lines: list[str]) -> Place:
    """Where a line of the code stands in the file: of a block below its ``|``, else in the same line."""
    code_lines = code.splitlines()
    wanted = code_lines[number - 1] if number <= len(code_lines) else ""
    start = lines[place.line - 1][place.column - 1 :]
    line = place.line + number if start.startswith("|") else place.line + number - 1
    found = lines[line - 1].find(wanted) if line <= len(lines) else -1
    if found < 0:  # folded or escaped: the lines of the file are not those of the code
        return place
    return Place(place.file, line, found + column)


def _written(document: Document, root: Any) -> Iterator[tuple[Place, str]]:
    """Every text under a key ``code``, in file order; what an alias repeats comes once."""
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list):
            waiting.extend(reversed(value))
            continue
        if isinstance(value.get("code"), str):
            yield document.place(value, "code"), value["code"]
        waiting.extend(reversed(list(value.values())))
