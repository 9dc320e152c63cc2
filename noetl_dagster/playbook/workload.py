"""Checks the values that override a workload: each has the type of the playbook's default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from noetl_dagster.errors import WorkloadError
from noetl_dagster.playbook.wording import described, is_open, suggestion

_TYPES = {
    bool: ("true or false", "write true or false"),
    int: ("an integer", "write a whole number, in a template {{ value | int }}"),
    float: ("a number", "write a number, in a template {{ value | float }}"),
    str: ("text", "write it in quotes, in a template {{ value | string }}"),
    list: ("a list", "write a list"),
    dict: ("a mapping", "write a mapping"),
}
"""Types of JSON: how messages name them, and how a value of the type is written."""


def wanted_type(default: Any) -> type | None:
    """Returns the type that values for a default must have; None for a default that accepts every value.

    Null and templates accept every value.
    """
    return None if is_open(default) else type(default)


def wanted_item_type(default: list[Any]) -> type | None:
    """Returns the type that all items of a default have, and which items of other lists must have."""
    types = {wanted_type(item) for item in default}
    return types.pop() if len(types) == 1 else None


def check_types(defaults: Mapping[str, Any], workload: Mapping[str, Any]) -> None:
    """Checks the values, in their stored form, that override the defaults of a playbook.

    Raises:
        WorkloadError: a value does not have the type of its default; the message names its key.
    """
    for error in wrong_types(defaults, workload):
        raise WorkloadError(error)


def wrong_types(defaults: Mapping[str, Any], workload: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error for each value, and each item of a list, that does not have the type of its default."""
    for key, value in workload.items():
        default = defaults.get(key)
        yield from _wrong(f"workload.{key}", value, wanted_type(default))
        if isinstance(default, list) and isinstance(value, list):
            wanted = wanted_item_type(default)
            for index, item in enumerate(value):
                yield from _wrong(f"workload.{key}[{index}]", item, wanted)


def unknown_keys(defaults: Mapping[str, Any], workload: Mapping[str, Any]) -> list[str]:
    """Returns a warning for each key that a playbook's workload lacks: mostly they are misspelt.

    Templates may use them all the same. A playbook without a workload accepts every key.
    """
    names = tuple(map(str, defaults))
    return [
        f"the workload has no key {key!r}; {suggestion(key, names, 'keys of the workload')}"
        for key in workload
        if names and key not in names
    ]


def _wrong(place: str, value: Any, wanted: type | None) -> Iterator[str]:
    if wanted not in _TYPES:
        return
    fits = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        name, fix = _TYPES[wanted]
        yield (
            f"{place} is {described(value)}, but its default is {name}; {fix}; or make the default null, which "
            "accepts every value"
        )
