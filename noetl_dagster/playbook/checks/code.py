"""Python code that does not compile, found without running it.

Loading does not ask for this: a step that is never reached may hold what it likes, and a failure at run time
can be routed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.models import Playbook

_KINDS = frozenset({"python", "spark"})


def check_code(playbook: Playbook, document: Document | None = None) -> Iterator[Problem]:
    """Syntax errors of ``code``, each at its own line and column of the file.

    Args:
        document: the YAML behind the playbook; read again from its source when not given.
    """
    tasks = [task for step in playbook.steps for task in step.tasks]
    tasks += playbook.workbook.values()
    codes = {task.config.get("code") for task in tasks if task.kind in _KINDS}
    document = document or Document(playbook.source, playbook.file)
    lines = playbook.source.splitlines()
    for place, code in _written(document, document.root):
        if code in codes:
            yield from _compiled(code, place, lines)


def _compiled(code: str, place: Place, lines: list[str]) -> Iterator[Problem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings and the like
            compile(code, "<code>", "exec", dont_inherit=True)
    except SyntaxError as error:
        where = _place_of(error, code, place, lines)
        message = f"code: {error.msg}; Python cannot compile this line"
        yield Problem(where, message, kind=ProblemKind.PYTHON_SYNTAX)
    except ValueError as error:  # a null character
        yield Problem(place, f"code: {error}", kind=ProblemKind.PYTHON_SYNTAX)


def _place_of(error: SyntaxError, code: str, place: Place, lines: list[str]) -> Place:
    """Where the line of the code stands in the file: of a block below its ``|``, else in the same line."""
    number, column = error.lineno or 1, error.offset or 1
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
