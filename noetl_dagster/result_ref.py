"""References to stored results: what travels through events in place of large values."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from noetl_dagster.settings import StoreTier

REF_METADATA = "noetl/ref"
"""Dagster metadata of a materialisation that names its result."""

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


def logical_ref(execution_id: int, step: str, ref_id: int) -> str:
    """The name of a result: ``noetl://execution/<eid>/result/<step>/<ref id>``."""
    return f"noetl://execution/{execution_id}/result/{step}/{ref_id}"
