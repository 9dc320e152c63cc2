"""Mappings and lists as Kubernetes writes them: which keys they have, and what stands below each.

A check looks at ``block[key]``, which is neither missing nor a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.cluster.values import object_wrong, word_wrong
from noetl_dagster.playbook.wording import described, is_template

Check = Callable[[Block, str], None]
Shape = Mapping[str, Check]


def is_open(value: Any) -> bool:
    """Known when the task runs, or never."""
    return value is None or (isinstance(value, str) and is_template(value))


def check_shape(block: Block, shape: Shape, needs: tuple[str, ...] = ()) -> None:
    """Reports keys that are not of the shape, those that are missing, and what is wrong below the others."""
    for key in tuple(block.values):
        if key in shape or is_template(str(key)):
            block.drop(key)
        if key in shape and not is_open(block[key]):
            shape[key](block, key)
    for key in needs:
        if block.values.get(key) is None and not any(block.rest()):  # else it may be misspelled
            block.error(f"{key!r} is missing", kind=ProblemKind.MISSING_FIELD)
    remedies = {key: _camel(str(key)) for key in block.rest()}
    block.close(
        shape,
        remedies={key: f"Kubernetes writes {ours!r}" for key, ours in remedies.items() if ours in shape},
    )


def mapping(shape: Shape, *needs: str) -> Check:
    def check(block: Block, key: str) -> None:
        child = block.reading.block(block.values, key, f"{block.what}, {key}")
        if child is not None:
            check_shape(child, shape, needs)

    return check


def entries(block: Block, key: str, example: str) -> list[Block]:
    """The mappings of a list; what is no list of mappings is reported."""
    value = block[key]
    if not isinstance(value, list):
        block.error(f"{key} must be a list of {example}, found {described(value)}", key)
        return []
    found = []
    for index, entry in enumerate(value):
        what = f"{block.what}, {key} {index + 1}"
        place = block.document.place(value, index)
        if isinstance(entry, dict):
            found.append(Block(block.reading, entry, what, place))
        elif not (isinstance(entry, str) and is_template(entry)):
            block.document.report(place, f"{what}: write {example}, found {described(entry)}")
    return found


def listed(shape: Shape, *needs: str, example: str) -> Check:
    def check(block: Block, key: str) -> None:
        for entry in entries(block, key, example):
            check_shape(entry, shape, needs)

    return check


def text(block: Block, key: str) -> None:
    value = block[key]
    if not isinstance(value, str):
        quotes = "" if isinstance(value, dict | list) else "; write it in quotes"
        block.error(f"{key} must be text, found {described(value)}{quotes}", key)
    elif not value.strip():
        block.error(f"{key} is empty", key)


def any_text(block: Block, key: str) -> None:
    """Also an empty one."""
    if block[key] != "":
        text(block, key)


def named(block: Block, key: str) -> None:
    """The name of an object of the cluster."""
    text(block, key)
    value = block[key]
    wrong = object_wrong(value) if isinstance(value, str) and value.strip() else None
    if wrong is not None:
        block.error(f"{key} {wrong}", key)


def word(*words: str) -> Check:
    def check(block: Block, key: str) -> None:
        wrong = word_wrong(key, str(block[key]), words)
        if wrong is not None:
            block.error(wrong, key)

    return check


def flag(block: Block, key: str) -> None:
    if not isinstance(block[key], bool):
        block.error(f"{key} must be true or false, found {described(block[key])}", key)


def whole(block: Block, key: str) -> None:
    if not isinstance(block[key], int) or isinstance(block[key], bool):
        block.error(f"{key} must be a whole number, found {described(block[key])}", key)


def words(block: Block, key: str) -> None:
    """A list of texts, numbers and booleans."""
    value = block[key]
    if not isinstance(value, list):
        block.error(f"{key} must be a list, found {described(value)}", key)
        return
    for index, part in enumerate(value):
        if isinstance(part, dict | list) or part is None:
            place = block.document.place(value, index)
            message = f"{block.what}, {key} {index + 1}: must be text, found {described(part)}"
            block.document.report(place, message)


def some_mapping(block: Block, key: str) -> None:
    block.reading.block(block.values, key, f"{block.what}, {key}")


def some_list(block: Block, key: str) -> None:
    if not isinstance(block[key], list):
        block.error(f"{key} must be a list, found {described(block[key])}", key)


def _camel(key: str) -> str:
    return re.sub(r"[_-]([a-z])", lambda found: found[1].upper(), key)
