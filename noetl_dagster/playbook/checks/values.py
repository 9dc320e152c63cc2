"""Warns of values that YAML reads otherwise than they look, and of names that mean another value than they seem to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from jinja2 import TemplateSyntaxError, nodes

from noetl_dagster.errors import Problem, ProblemKind
from noetl_dagster.playbook.checks.templates import SKIPPED_KEYS, own_names
from noetl_dagster.playbook.document import Document, texts_in
from noetl_dagster.playbook.models import Playbook, Step
from noetl_dagster.playbook.templates.reading import read
from noetl_dagster.playbook.tool_kinds import INPUT, SET_BLOCKS, TOOL_KINDS
from noetl_dagster.playbook.wording import described, suggestion

_VALUES = frozenset({"workload", "payload", "params", *INPUT, *SET_BLOCKS})
_UNQUOTED = re.compile(r"[^\s,\]}]*")
_TRAPS: tuple[tuple[type, str, str], ...] = (
    (bool, "yes|no|on|off", "write true or false, or quote it"),
    (int, "[-+]?0[0-7_]+", "a leading 0 means octal; quote it, or leave the 0 out"),
    (object, r"[-+]?[1-9][\d_]*(:[0-5]?\d)+(\.\d*)?", "colons mean base 60; quote it"),
    (str, r"[-+]?\d+(\.\d*)?e[-+]?\d+", "a number has a point and a signed exponent, as 1.0e+3; else quote it"),
    (str, "0o[0-7]+", "octal numbers begin with 0; write a decimal number, or quote it"),
)
"""Spellings without quotes, the type of their values, and the fix."""

_OF_EVERY_RESULT = (
    *("status", "data", "error", "meta", "ref", "_ref", "results", "result", "response", "http", "pg", "py"),
    *("items", "keys", "values", "get", "count", "index"),
)
_OF_LOOPS = ("total", "done", "failed", "stats")
_STATEMENT = re.compile(r"command_\d+")


def trap_of(value: Any, spelled: str) -> str | None:
    """Returns how YAML reads a spelling as another value than people mean, and the fix; None if it does not."""
    for kind, trap, fix in _TRAPS:
        if isinstance(value, kind) and re.fullmatch(trap, spelled, re.IGNORECASE):
            return f"YAML reads {spelled} as {described(value)}: {fix}"
    return None


def check_values(playbook: Playbook, document: Document | None = None) -> Iterator[Problem]:
    """Yields warnings; ``document`` is the YAML behind the playbook, read again from its source when not given."""
    document = document or Document(playbook.source, playbook.file)
    lines = playbook.source.splitlines()
    for holder, block in _blocks_of_values(document.root):
        for owner, key, label, value in texts_in(holder, block, of=object):
            place = document.place(owner, key)
            [spelled, *_] = _UNQUOTED.findall(lines[place.line - 1], place.column - 1)
            if (trap := trap_of(value, spelled)) is not None:
                yield Problem(place, f"{block}, {label}: {trap}", "warning")
    steps = {step.name: step for step in playbook.steps}
    for name in sorted(steps.keys() & playbook.workload.keys()):
        place = document.key_place(document.root["workload"], name)
        message = f"workload key {name!r} hides the result of step {name!r} in templates; rename one"
        yield Problem(place, message, "warning", ProblemKind.DUPLICATE_NAME)
    results = {name: steps[name] for name in steps.keys() - own_names(playbook)}
    for owner, key, label, text in texts_in(document.root, "workflow", SKIPPED_KEYS):
        for name, attribute, is_last in _attributes(text) if any(map(text.__contains__, results)) else ():
            for wrong in _wrong_key(results[name], attribute, is_last) if name in results else ():
                place = document.place(owner, key)
                yield Problem(place, f"{label}: {wrong}", "warning", ProblemKind.UNDEFINED_NAME)


def _blocks_of_values(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in _VALUES:
            yield value, key
        else:
            yield from _blocks_of_values(inner)


def _attributes(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields each ``name.attribute`` of a text's templates, and whether nothing follows it."""
    with suppress(TemplateSyntaxError):  # another check reports it
        paths: list[Any] = list(read(text, command=True)[1].find_all((nodes.Getattr, nodes.Getitem)))
        inner = {id(path.node) for path in paths}
        for path in paths:
            if isinstance(path, nodes.Getattr) and isinstance(path.node, nodes.Name):
                yield path.node.name, path.attr, id(path) not in inner


def _wrong_key(step: Step, attribute: str, is_last: bool) -> Iterator[str]:
    own, is_complete = _keys_of(step)
    known = (*own, *_OF_EVERY_RESULT)
    if attribute in own and (attribute == "status" or (attribute == "data" and is_last)):
        meaning = "how the step ended" if attribute == "status" else "the whole result"
        yield f"{step.name}.{attribute} is {meaning}; the result's own key is {step.name}.data.{attribute}"
    elif is_complete and attribute not in known and not _STATEMENT.fullmatch(attribute):
        yield f"the result of step {step.name!r} has no {attribute!r}; {suggestion(attribute, known)}"


def _keys_of(step: Step) -> tuple[tuple[str, ...], bool]:
    """Returns keys of a step's result, and whether it has no others."""
    if step.loop is not None:
        return _OF_LOOPS, True
    if len(step.tasks) != 1 or step.tasks[0].retry or step.tasks[0].kind not in TOOL_KINDS:
        return (), False
    [task] = step.tasks
    shape = next((one for one in (step.output, task.output, task.config.get("result")) if one is not None), None)
    if shape is not None:
        return (tuple(shape), "data" not in shape) if isinstance(shape, dict) else ((), False)
    if task.kind == "python":
        return tuple(_literal_keys(str(task.config.get("code")))), False
    keys = TOOL_KINDS[task.kind].result
    return keys, bool(keys) and task.config.keys().isdisjoint({"as", "chunk_size"})


def _literal_keys(code: str) -> Iterable[str]:
    """Yields the keys of mappings that the code returns, or calls ``result``."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Return(value=ast.Dict(keys=keys)) | ast.Assign([ast.Name("result")], ast.Dict(keys=keys)):
                    yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))
