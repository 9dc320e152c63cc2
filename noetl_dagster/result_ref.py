"""References to stored results, which events carry instead of large values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from noetl_dagster.errors import IntegrityError
from noetl_dagster.settings import StoreTier

REF_METADATA = "noetl/ref"
"""Metadata of a Dagster materialisation: the name of its result."""

ROWS_ALONE = "#rows"
"""Suffix of the name of the rows of a mapping that contains many rows and other fields."""

STORED_METADATA = "noetl/stored"
"""Metadata of a Dagster materialisation: the complete reference to its value."""

DEEPEST = 50
"""Manifests in one another: loops in loops make a few."""


class ResultScope(StrEnum):
    """Lifetimes of results."""

    STEP = "step"
    EXECUTION = "execution"
    WORKFLOW = "workflow"
    PERMANENT = "permanent"


class RefKind(StrEnum):
    """The targets of references: one object, a folder of part files, or a manifest of references."""

    OBJECT = "object"
    DATASET = "dataset"
    MANIFEST = "manifest"


class ResultRef(BaseModel, frozen=True):
    """A stored result. ``ref`` is its logical name, ``physical_uri`` the location of its bytes.

    Attributes:
        ref: ``noetl://execution/<execution id>/result/<step>/<id>``.
        bytes_size: stored bytes (after compression).
        sha256: hex digest of the stored bytes; None for datasets and manifests.
        preview: the first 1 KB or less, for people.
        extracted: fields that ``output_select`` copied, available without fetching the result.
        extra: facts of the format: columns, partitions, files.
    """

    ref: str
    execution_id: int
    source_step: str
    name: str
    kind: RefKind = RefKind.OBJECT
    store_tier: StoreTier
    physical_uri: str
    content_type: str = "application/json"
    compression: str = "none"
    bytes_size: int = 0
    sha256: str | None = None
    rows: int | None = None
    preview: str | None = None
    extracted: dict[str, Any] = Field(default_factory=dict)
    scope: ResultScope = ResultScope.EXECUTION
    expires_at: datetime | None = None
    parent_ref_id: int | None = None
    ref_id: int = Field(0, description="snowflake, primary key of noetl.result_ref")
    extra: dict[str, Any] = Field(default_factory=dict)
    _nesting: int = PrivateAttr(0)

    def nested_in(self, ref: ResultRef) -> ResultRef:
        """Returns a manifest as a part of another; raises ``IntegrityError`` if they contain each other."""
        if ref._nesting >= DEEPEST:
            raise IntegrityError(
                f"{self.ref} is nested deeper than {DEEPEST} manifests, or in itself; run the step again"
            )
        part = self.model_copy()
        part._nesting = ref._nesting + 1
        return part

    @property
    def around(self) -> RowsAround | None:
        """The fields around the rows of a mapping that contains many rows; None for other results."""
        around = self.extra.get("around")
        try:
            return None if around is None else RowsAround.model_validate(around)
        except ValidationError:
            raise IntegrityError(f"{self.ref}: the fields around its rows are damaged; run the step again") from None

    @property
    def rows_alone(self) -> ResultRef:
        """The rows of such a mapping as a separate result, whose name ends in ``#rows``."""
        if self.is_rows:
            return self
        extra = {key: value for key, value in self.extra.items() if key != "around"}
        return self.model_copy(update={"ref": self.ref + ROWS_ALONE, "extra": extra, "extracted": {}})

    @property
    def is_rows(self) -> bool:
        """True for a result of :attr:`rows_alone`."""
        return self.ref.endswith(ROWS_ALONE)

    @property
    def first_part(self) -> ResultRef:
        """The first part of a manifest as a separate result."""
        return self.model_copy(update={"ref": self.ref + "#first", "extra": {**self.extra, "only_first": True}})


class RowsAround(BaseModel, frozen=True):
    """A mapping without its rows, for example a SQL result.

    Attributes:
        fields: the mapping without its rows.
        at: dotted paths of the rows in the mapping; several paths may lead to the same rows.
        stored: references to large fields.
    """

    fields: dict[str, Any]
    at: tuple[str, ...] = ("rows",)
    stored: dict[str, ResultRef] = Field(default_factory=dict)

    def mapping(self, rows: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the complete mapping, with its rows and the values of its stored fields."""
        whole = {key: dict(value) if isinstance(value, dict) else value for key, value in self.fields.items()}
        whole |= stored
        for path in self.at:
            *way, last = path.split(".")
            place = whole
            for key in way:
                place = place.setdefault(key, {})
            place[last] = rows
        return whole


def logical_ref(execution_id: int, step: str, ref_id: int) -> str:
    """Returns the name of a result: ``noetl://execution/<eid>/result/<step>/<ref id>``."""
    return f"noetl://execution/{execution_id}/result/{step}/{ref_id}"
