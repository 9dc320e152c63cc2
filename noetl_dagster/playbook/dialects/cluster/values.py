"""Single values of Kubernetes: what is wrong with one, in words; None where nothing is. Templates are no values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.pods import GPU, amount_of
from noetl_dagster.playbook.wording import described, suggestion

_LABEL = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_VARIABLE = re.compile(r"^[-._A-Za-z][-._A-Za-z0-9]*$")
_OBJECT = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")

LEAST_BYTES = Decimal(1024 * 1024)
"""Less memory than this is a unit that was forgotten: no process starts in it."""

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
OPERATORS = ("Exists", "Equal")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class Texts(NamedTuple):
    """Mappings of one sort: patterns of their names and of their values, and what an entry is called."""

    names: re.Pattern[str]
    values: re.Pattern[str] | None
    what: str


LABELS = Texts(_KEY, _LABEL, "a label")
ANNOTATIONS = Texts(_KEY, None, "an annotation")
VARIABLES = Texts(_VARIABLE, None, "an environment variable")


def named_wrong(key: str, name: Any, sort: Texts) -> str | None:
    if sort.names.match(str(name)):
        return None
    return f"{key}: {name!r} cannot be the name of {sort.what}"


def valued_wrong(key: str, text: str, sort: Texts) -> str | None:
    if sort.values is None or sort.values.match(text):
        return None
    return f"{key}: {text!r} cannot be the value of {sort.what}; 63 letters, digits, '-_.'"


def word_wrong(key: str, text: str, words: tuple[str, ...]) -> str | None:
    return None if text in words else f"{key} is {text!r}; {suggestion(text, words, 'use one of')}"


def object_wrong(text: str) -> str | None:
    """Of the name of an object of the cluster."""
    return (
        None
        if _OBJECT.match(text)
        else f"{text!r} is no name of Kubernetes; use small letters, digits, '-' and '.'"
    )


def quantity_wrong(key: str, value: Any, example: str, least: Decimal) -> str | None:
    usable = isinstance(value, str | int | float) and not isinstance(value, bool)
    amount = amount_of(str(value).strip()) if usable else None
    if amount is None or amount <= 0:
        return f"{key} is no quantity: {described(value)}; write {example}"
    if amount < least:
        return f"{key} {value} is {amount.normalize():f} bytes; write a unit, such as 512Mi or 4Gi"
    return None


def devices_wrong(key: str, name: Any, number: Any) -> str | None:
    """Of ``nvidia.com/gpu: 1``."""
    if not isinstance(number, bool) and str(number).strip().isdecimal() and _KEY.match(str(name)):
        return None
    return f"{key}: {name!r} is {described(number)}; write a whole number, or {{{GPU}: 1}}: devices are not shared"


def exceeds(request: str, limit: str) -> bool:
    return (amount_of(request) or 0) > (amount_of(limit) or 0)


def check_toleration(entry: Block, said: Mapping[str, Any]) -> None:
    """Reports what contradicts itself in a toleration."""
    if said.get("operator") == "Exists" and "value" in said:
        entry.error("operator Exists takes no value; leave it out, or write operator: Equal", "value")
    if "key" not in said and said.get("operator") != "Exists":
        entry.error("a toleration needs 'key', or operator: Exists", kind=ProblemKind.MISSING_FIELD)
