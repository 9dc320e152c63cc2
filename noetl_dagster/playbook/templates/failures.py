"""Shows ``error`` to templates, also to those that compare its kind with the name of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SeenKind(str):
    """``error.kind``, which also equals the name of the tool that failed: some playbooks test that.

    To JSON and to everything but a comparison it is the kind alone.
    """

    source: str

    def __new__(cls, kind: str, source: str = "") -> SeenKind:
        """Creates the text of the kind, with its source."""
        seen = super().__new__(cls, kind)
        seen.source = source
        return seen

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and other == self.source)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def seen_error(error: Any) -> Any:
    """Returns the ``error`` part of an envelope for templates; an error without ``source`` as it is."""
    if isinstance(error, Mapping) and error.get("source"):
        return {**error, "kind": SeenKind(str(error.get("kind")), str(error["source"]))}
    return error
