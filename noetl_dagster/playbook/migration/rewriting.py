"""A playbook's text in today's words, which loads to the same playbook."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from noetl_dagster.errors import Place, Problem
from noetl_dagster.playbook.document import NOT_UNDERSTOOD
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.migration.source import Source, UnwritableError
from noetl_dagster.playbook.migration.words import Words
from noetl_dagster.playbook.migration.writing import written
from noetl_dagster.playbook.models import Playbook

_COMMENT = re.compile(r"(?:^|\s)(#.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    """A text in today's words, or as it was where it cannot be rewritten, and the reasons."""

    text: str
    problems: tuple[Problem, ...] = ()


def migrate(text: str, file: str) -> Migration:
    """Rewrites a playbook.

    A playbook with errors is left as it is: what it means is not known. The same goes where a comment would be lost.
    Keys and tool kinds that are not understood stay.
    """
    playbook, found = parse_report(text, file=file, lenient=True)
    if playbook is None:
        errors = (problem for problem in found if problem.severity == "error")
        return Migration(text, tuple(errors))
    ignored = tuple(problem for problem in found if problem.kind in NOT_UNDERSTOOD)
    plain = text.replace("\r\n", "\n")
    words = Words(file)
    try:
        source = Source(plain)
        words.rewrite(source.root)
        after = written(source)
    except UnwritableError as error:
        return Migration(text, (*ignored, Problem(Place(file, 1), f"is left as it is: {error}")))
    problems = (*ignored, *words.problems)
    if after == plain:
        return Migration(text, problems)
    reason = _difference(playbook, plain, after, file)
    if reason is None:
        return Migration(_with_endings(text, plain, after), problems)
    return Migration(text, (*problems, Problem(Place(file, 1), f"is left as it is: {reason}")))


def _with_endings(text: str, before: str, after: str) -> str:
    """Returns ``after`` with the ends of lines that ``text`` has; ``before`` is the text with plain ones."""
    if text == before:
        return after
    ends, crlf = text.count("\n"), text.count("\r\n")
    if ends == crlf:
        return after.replace("\n", "\r\n")
    old, new = text.split("\n"), after.split("\n")
    lines = [f"{line}\r" for line in new] if 2 * crlf > ends else list(new)
    for first, second, size in SequenceMatcher(None, before.split("\n"), new).get_matching_blocks():
        lines[second : second + size] = old[first : first + size]
    return "\n".join(lines)


def _difference(playbook: Playbook, before: str, after: str, file: str) -> str | None:
    """Explains why a rewritten text is another playbook or lost comments; returns None if it is the same."""
    rewritten, _ = parse_report(after, file=file, lenient=True)
    if rewritten is None:
        return "in today's words it would not load"
    changed = _changed(_meaning(playbook), _meaning(rewritten))
    if changed is not None:
        return f"in today's words {changed or 'it'} would be something else"
    lost = Counter(_COMMENT.findall(before)) - Counter(_COMMENT.findall(after))
    return f"the comment {next(iter(lost))!r} would be lost" if lost else None


def _meaning(playbook: Playbook) -> Any:
    meaning = playbook.model_dump(exclude={"source", "file", "warnings"}, context={"without_places": True})
    return {**meaning, "keys that are not understood": len(playbook.warnings)}


def _changed(before: Any, after: Any) -> str | None:
    """Returns the path of the first difference; None if there is none."""
    if before == after:
        return None
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(key, before.get(key), after.get(key)) for key in {**before, **after}]
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        pairs = [(index, *both) for index, both in enumerate(zip(before, after, strict=True))]
    for key, old, new in pairs:
        inner = _changed(old, new)
        if inner is not None:
            return f"{key}.{inner}".rstrip(".")
    return ""
