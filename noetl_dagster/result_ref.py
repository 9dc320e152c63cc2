"""References to stored results: what travels through events in place of large values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from noetl_dagster.settings import StoreTier

REF_METADATA = "noetl/ref"
"""Dagster metadata of a materialisation that names its result."""

ROWS_ALONE = "#rows"
"""End of the name of a result's rows, where it is a mapping that holds many beside other fields."""

STORED_METADATA = "noetl/stored"
"""Dagster metadata of a materialisation that says where its value lies: a whole reference."""


class ResultScope(StrEnum):
    STEP = "step"
    EXECUTION = "execution"
    WORKFLOW = "workflow"
    PERMANENT = "permanent"


class RefKind(StrEnum):
    """What a reference stands for: one object, a folder of part files, or a manifest of references."""

    OBJECT = "object"
    DATASET = "dataset"
    MANIFEST = "manifest"


class ResultRef(BaseModel):
    """A stored result. ``ref`` is its logical name, ``physical_uri`` where its bytes are.

    Attributes:
        ref: ``noetl://execution/<execution id>/result/<step>/<id>``.
        bytes_size: stored bytes (after compression).
        sha256: hex digest of the stored bytes; None for datasets and manifests.
        preview: at most 1 KB of the beginning, for people.
        extracted: fields copied out by ``output_select``, usable without fetching.
        extra: facts of the format: columns, partitions, files.
    """

    model_config = ConfigDict(frozen=True)

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

    @property
    def around(self) -> RowsAround | None:
        """What stands around the rows of a mapping that holds many; None of any other result."""
        around = self.extra.get("around")
        return None if around is None else RowsAround.model_validate(around)

    @property
    def rows_alone(self) -> ResultRef:
        """The rows of a mapping that holds many, as a result of their own, whose name ends in ``#rows``."""
        if self.is_rows:
            return self
        extra = {key: value for key, value in self.extra.items() if key != "around"}
        return self.model_copy(update={"ref": self.ref + ROWS_ALONE, "extra": extra, "extracted": {}})

    @property
    def is_rows(self) -> bool:
        """Whether it is what :attr:`rows_alone` gives."""
        return self.ref.endswith(ROWS_ALONE)

    @property
    def first_part(self) -> ResultRef:
        """What the first part of a manifest alone gives, as a result of its own."""
        return self.model_copy(
            update={"ref": self.ref + "#first", "extra": {**self.extra, "only_first": True}}
        )


class RowsAround(BaseModel):
    """What stands around the rows of a mapping, as a SQL result is one.

    Attributes:
        fields: the mapping without its rows.
        at: dotted paths in it where the rows stand; there may be several to the same rows.
        stored: large fields, each behind a reference.
    """

    model_config = ConfigDict(frozen=True)

    fields: dict[str, Any]
    at: tuple[str, ...] = ("rows",)
    stored: dict[str, ResultRef] = Field(default_factory=dict)

    def mapping(self, rows: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The mapping with rows in their places, and the values of what is stored."""
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
    """The name of a result: ``noetl://execution/<eid>/result/<step>/<ref id>``."""
    return f"noetl://execution/{execution_id}/result/{step}/{ref_id}"
