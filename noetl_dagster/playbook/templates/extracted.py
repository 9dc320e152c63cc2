"""Fields copied beside a stored result: where a template finds them without fetching it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = object()
"""Marks a name that was not found."""


def extracted_field(extracted: Mapping[str, Any], key: str, *, inside: bool = False) -> Any:
    """The field of this path, else the one whose path ends so: ``total`` of ``data.paging.total``; or NOTHING.

    Inside of a mapping of the result only paths count.
    """
    if key in extracted:
        return extracted[key]
    if inside:
        return NOTHING
    ending = f".{key}"
    return next((value for path, value in extracted.items() if path.endswith(ending)), NOTHING)


def extracted_below(extracted: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The fields below a mapping: of ``paging.total`` below ``paging`` it is ``total``."""
    return {
        path.removeprefix(prefix): value
        for prefix in (f"data.{key}.", f"{key}.")
        for path, value in extracted.items()
        if path.startswith(prefix)
    }
