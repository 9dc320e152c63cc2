"""Checks values, mappings and lists that a playbook writes as Kubernetes does.

A check is called with a block and a key; the value is neither missing nor a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.pods import GPU, amount_of
from noetl_dagster.playbook.wording import described, is_open, is_template, suggestion

Check = Callable[[Block, str], None]
Shape = Mapping[str, Check]

_LABEL = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_VARIABLE = re.compile(r"^[-._A-Za-z][-._A-Za-z0-9]*$")
_OBJECT = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")

LEAST_BYTES = Decimal(1024 * 1024)
"""Less memory than this means that the unit was forgotten: no process starts in it."""

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
OPERATORS = ("Exists", "Equal")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class TextMapping(NamedTuple):
    """Patterns of the names and values of a mapping of texts, and the word for one entry."""

    names: re.Pattern[str]
    values: re.Pattern[str] | None
    what: str


LABELS = TextMapping(_KEY, _LABEL, "a label")
ANNOTATIONS = TextMapping(_KEY, None, "an annotation")
VARIABLES = TextMapping(_VARIABLE, None, "an environment variable")


# -- single values


def _value(wrong: Callable[[Any], str | None]) -> Check:
    """Makes a check that reports what ``wrong`` says of a value."""

    def check(block: Block, key: str) -> None:
        reason = wrong(block[key])
        if reason is not None:
            block.error(f"{key} {reason}", key)

    return check


def _text_wrong(value: Any) -> str | None:
    if not isinstance(value, str):
        quotes = "" if isinstance(value, dict | list) else "; write it in quotes"
        return f"must be text, found {described(value)}{quotes}"
    return None if value.strip() else "is empty"


def _of_type(type_: type, what: str) -> Check:
    def wrong(value: Any) -> str | None:
        is_right = isinstance(value, type_) and (type_ is bool or not isinstance(value, bool))
        return None if is_right else f"must be {what}, found {described(value)}"

    return _value(wrong)


def word(*words: str) -> Check:
    """Makes a check that reports a value that is none of the words."""

    def wrong(value: Any) -> str | None:
        given = str(value)
        return None if given in words else f"is {given!r}; {suggestion(given, words, 'use one of')}"

    return _value(wrong)


text = _value(_text_wrong)
any_text = _value(lambda value: None if value == "" else _text_wrong(value))
object_name = _value(lambda value: _text_wrong(value) or object_wrong(value))
flag = _of_type(bool, "true or false")
whole = _of_type(int, "a whole number")
some_list = _of_type(list, "a list")


def quantity(example: str, least: Decimal = Decimal(0), *, zero: bool = True) -> Check:
    """Makes a check of a quantity such as ``500m`` or ``4Gi``; ``zero``: it may be 0."""

    def wrong(value: Any) -> str | None:
        usable = isinstance(value, str | int | float) and not isinstance(value, bool)
        amount = amount_of(str(value).strip()) if usable else None
        if amount is None or amount < 0 or (amount == 0 and not zero):
            return f"is no quantity: {described(value)}; write {example}"
        if 0 < amount < least:
            return f"{value} is {amount.normalize():f} bytes; write a unit, such as 512Mi or 4Gi"
        return None

    return _value(wrong)


def object_wrong(name: str) -> str | None:
    """Explains why a text cannot be the name of an object of the cluster."""
    if _OBJECT.match(name):
        return None
    return f"{name!r} is no name of Kubernetes; use small letters, digits, '-' and '.'"


def devices_wrong(key: str, name: Any, number: Any) -> str | None:
    """Explains what is wrong with ``nvidia.com/gpu: 1``."""
    if not isinstance(number, bool) and str(number).strip().isdecimal() and _KEY.match(str(name)):
        return None
    return f"{key}: {name!r} is {described(number)}; write a whole number, or {{{GPU}: 1}}: devices are not shared"


def name_wrong(key: str, name: Any, sort: TextMapping) -> str | None:
    """Explains why a text cannot be the name of an entry."""
    return None if sort.names.match(str(name)) else f"{key}: {name!r} cannot be the name of {sort.what}"


def entry_wrong(key: str, name: Any, value: Any, sort: TextMapping, *, quoted: bool = False) -> str | None:
    """Explains what is wrong with one entry of a mapping of texts; ``quoted``: the value must be a string."""
    wrong = None if is_template(str(name)) else name_wrong(key, name, sort)
    if wrong is not None:
        return wrong
    if isinstance(value, dict | list) or value is None:
        return f"{key}: {name!r} must be text, found {described(value)}"
    if quoted and not isinstance(value, str):
        return f"{key}: {name!r} must be text, found {described(value)}; write it in quotes"
    if sort.values is None or is_template(str(value)) or sort.values.match(str(value)):
        return None
    return f"{key}: {str(value)!r} cannot be the value of {sort.what}; 63 letters, digits, '-_.'"


# -- lists and mappings


def words(block: Block, key: str) -> None:
    """Reports a value that is not a list of texts, numbers and booleans."""
    some_list(block, key)
    for index, part in enumerate(block[key] if isinstance(block[key], list) else ()):
        if isinstance(part, dict | list) or part is None:
            place = block.document.place(block[key], index)
            message = f"{block.what}, {key} {index + 1}: must be text, found {described(part)}"
            block.document.report(place, message)


def some_mapping(block: Block, key: str) -> None:
    """Reports a value that is not a mapping."""
    block.child(key)


def texts(sort: TextMapping, *, quoted: bool = False) -> Check:
    """Makes a check of a mapping of names to texts."""

    def check(block: Block, key: str) -> None:
        child = block.child(key)
        for name, value in {} if child is None else child.values.items():
            wrong = entry_wrong(key, name, value, sort, quoted=quoted)
            if wrong is not None:
                block.document.report(block.document.place(block[key], name), f"{block.what}: {wrong}")

    return check


def check_shape(block: Block, shape: Shape, needs: tuple[str, ...] = ()) -> None:
    """Reports unknown and missing keys of a mapping, and checks the values of the others."""
    for key in tuple(block.values):
        if key in shape or is_template(str(key)):
            block.drop(key)
        if key in shape and not is_open(block[key]):
            shape[key](block, key)
    for key in needs:
        if block.values.get(key) is None and not any(block.rest()):  # else it may be misspelled
            block.missing(f"{key!r} is missing")
    camel = {key: re.sub(r"[_-]([a-z])", lambda found: found[1].upper(), str(key)) for key in block.rest()}
    remedies = {key: f"Kubernetes writes {theirs!r}" for key, theirs in camel.items() if theirs in shape}
    block.close(shape, remedies=remedies)


def mapping(shape: Shape, *needs: str) -> Check:
    """Makes a check of a mapping with the keys of a shape."""

    def check(block: Block, key: str) -> None:
        child = block.child(key)
        if child is not None:
            check_shape(child, shape, needs)

    return check


def entries(block: Block, key: str, example: str) -> list[Block]:
    """Returns the mappings of a list, without templates; reports everything else."""
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
    """Makes a check of a list of mappings with the keys of a shape."""

    def check(block: Block, key: str) -> None:
        for entry in entries(block, key, example):
            check_shape(entry, shape, needs)

    return check


TOLERATION: Shape = {
    "key": text,
    "operator": word(*OPERATORS),
    "value": any_text,
    "effect": word(*EFFECTS),
    "tolerationSeconds": whole,
}


def tolerations(block: Block, key: str) -> None:
    """Reports tolerations that Kubernetes would refuse."""
    for entry in entries(block, key, "{key, operator, value, effect}"):
        check_shape(entry, TOLERATION)
        check_operator(entry)


def check_operator(toleration: Block) -> None:
    """Reports a toleration that contradicts itself."""
    given = {name: value for name, value in toleration.values.items() if value is not None}
    if given.get("operator") not in (None, *OPERATORS):
        return
    if given.get("operator") == "Exists" and "value" in given:
        toleration.error("operator Exists takes no value; leave it out, or write operator: Equal", "value")
    if "key" not in given and given.get("operator") != "Exists":
        toleration.missing("a toleration needs 'key', or operator: Exists")


def exceeds(request: Any, limit: Any) -> bool:
    """Reports whether a request is more than its limit; both are quantities."""
    return (amount_of(str(request)) or 0) > (amount_of(str(limit)) or 0)
