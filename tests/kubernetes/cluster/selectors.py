"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.store import Object

_SET = re.compile(r"(?P<key>\S+) +(?P<how>in|notin) *\((?P<values>[^)]*)\)")
_PLAIN = re.compile(r"(?P<key>[^!=\s]+)\s*(?P<how>==|=|!=)\s*(?P<value>\S*)")


def labels_match(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels fit a selector such as ``a=b,c!=d,e in (f, g),h,!i``."""
    return all(_fits(part.strip(), labels) for part in re.split(r",(?![^(]*\))", selector) if part.strip())


def fields_match(selector: str, found: Object) -> bool:
    """Whether an object fits a selector such as ``metadata.name=a,status.phase!=Running``."""
    values = {path: str(field_at(found, path) or "") for path in re.findall(r"([\w.]+)\s*!?=", selector)}
    return labels_match(selector, values)


def field_at(found: Any, path: str) -> Any:
    """What stands at a path with dots, ``metadata.labels['a.b']`` included; None where nothing does."""
    match = re.fullmatch(r"(.+)\['(.+)'\]", path)
    for part in [*match[1].split("."), match[2]] if match else path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _fits(part: str, labels: Mapping[str, str]) -> bool:
    if found := _SET.fullmatch(part):
        values = [value.strip() for value in found["values"].split(",")]
        return (labels.get(found["key"]) in values) == (found["how"] == "in")
    if found := _PLAIN.fullmatch(part):
        return (labels.get(found["key"]) == found["value"]) == (found["how"] != "!=")
    if part.startswith("!"):
        return part[1:] not in labels
    if " " in part:
        raise Refused(400, "BadRequest", f"unable to parse requirement: {part}")
    return part in labels
