"""A playbook's text in today's words, which loads to the same playbook."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from io import StringIO
from itertools import pairwise
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.anchor import Anchor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook.document import NOT_UNDERSTOOD
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.migration.words import Words
from noetl_dagster.playbook.models import Playbook

_UNWRAPPED = 1_000_000
_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COMMENT = re.compile(r"(?:^|\s)(#.*?)\s*$", re.MULTILINE)
_LIST = re.compile(r"^( *)(?:- +)*[\w.]+:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*( *)- ", re.MULTILINE)
_UNWRITABLE_FOLD = re.compile(r"\a(?! \S)|(?<=\s)\a")
"""Marks of the reader, where lines of a folded text were joined, that the writer takes between two words only."""


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
    ending = "\r\n" if "\r\n" in text else "\n"
    plain = text.replace("\r\n", "\n")
    try:
        before = _written(_composed(plain), plain)  # as the writer lays the text out
        root, words = _composed(plain), Words(file)
        words.rewrite(root)
        after, problems = _written(root, plain), (*ignored, *words.problems)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(file, 1 if mark is None else mark.line + 1)
        problem = Problem(place, f"not valid YAML 1.2: {error}", kind=ProblemKind.YAML_SYNTAX)
        return Migration(text, (problem,))
    if before == after:
        return Migration(text, problems)
    parts = [_sections(part) for part in (plain, before, after)]
    for candidate in (merged(*parts), merged(*parts, by_line=False), after):
        reason = _difference(playbook, plain, candidate, file)
        if reason is None:
            return Migration(candidate.replace("\n", ending), problems)
    return Migration(text, (*problems, Problem(Place(file, 1), f"is left as it is: {reason}")))


def _composed(text: str) -> Any:
    root = YAML().compose(text)
    _keep(root, set())
    return root


def _keep(node: Node, seen: set[int]) -> None:
    """Tells the writer what it would not keep: the names of anchors, and folded texts with lines further in."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, ScalarNode) and node.style == ">":
        node.value = _UNWRITABLE_FOLD.sub("", node.value)
    if isinstance(node.anchor, str):
        kept: Any = Anchor()
        kept.value, kept.always_dump = node.anchor, True
        node.anchor = kept
    if isinstance(node, MappingNode):
        for key, value in node.value:
            _keep(key, seen)
            _keep(value, seen)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            _keep(item, seen)


def _written(root: Any, text: str) -> str:
    writer = YAML()
    writer.width = _UNWRAPPED
    writer.brace_single_entry_mapping_in_flow_sequence = True
    offsets = Counter(len(dash) - len(key) for key, dash in _LIST.findall(text))  # of lists below their key
    offset = next((offset for offset, _ in offsets.most_common() if offset in (0, 2)), 0)
    writer.indent(mapping=2, sequence=2 + offset, offset=offset)
    stream = StringIO()
    writer.serialize(root, stream)
    return stream.getvalue()


def _sections(text: str) -> list[str]:
    """Splits the text by the keys of its root and by its steps, so that any layout gives as many parts."""
    root: Any = yaml.compose(text, Loader=_FAST)
    starts = {0}
    for key, value in root.value:
        starts.add(key.start_mark.line)
        if key.value == "workflow" and isinstance(value, yaml.SequenceNode):
            starts.update(step.start_mark.line for step in value.value)
    lines = text.splitlines(keepends=True)
    edges = [*sorted(starts), len(lines)]
    return ["".join(lines[start:end]) for start, end in pairwise(edges)]


def merged(original: list[str], before: list[str], after: list[str], *, by_line: bool = True) -> str:
    """Applies the change from ``before`` to ``after`` to ``original``.

    Args:
        original: the sections of the text as it stands in the file.
        before: the same, as the writer lays them out.
        after: what the writer lays out once the words are rewritten; it wins where both differ.
        by_line: lines of a section that changes may stay, too. Sections keep this linear in the size of a text.
    """
    if not len(original) == len(before) == len(after):
        return "".join(after)
    return "".join(
        own if old == new else _by_line(own, old, new) if by_line else new
        for own, old, new in zip(original, before, after, strict=True)
    )


def _by_line(original: str, before: str, after: str) -> str:
    own, old, new = (text.splitlines(keepends=True) for text in (original, before, after))
    result: list[str] = []
    in_own = in_old = in_new = 0
    for start, end, own_start, new_start in _untouched(own, old, new):
        changed = old[in_old:start] != new[in_new:new_start]
        result += new[in_new:new_start] if changed else own[in_own:own_start]
        result += own[own_start : own_start + end - start]
        in_own, in_old, in_new = own_start + end - start, end, new_start + end - start
    return "".join(result)


def _untouched(original: list[str], before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    """Runs of lines that all three have: begin and end in ``before``, begin in ``original`` and in ``after``."""
    own = SequenceMatcher(None, before, original, autojunk=False).get_matching_blocks()
    new = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    found = []
    first = second = 0
    while first < len(own) and second < len(new):
        low = max(own[first].a, new[second].a)
        high = min(own[first].a + own[first].size, new[second].a + new[second].size)
        if low < high:
            found.append((low, high, own[first].b + low - own[first].a, new[second].b + low - new[second].a))
        if own[first].a + own[first].size < new[second].a + new[second].size:
            first += 1
        else:
            second += 1
    return [*found, (len(before), len(before), len(original), len(after))]


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
