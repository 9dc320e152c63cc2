"""Result references as they reach tools: as models, as the mappings of events, and as logical names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from noetl_dagster.result_ref import ResultRef

LOGICAL_PREFIX = "noetl://"


def as_result_ref(value: Any) -> ResultRef | str | None:
    """The reference that a value is: a model, or a logical name to look up; None for anything else."""
    if isinstance(value, ResultRef):
        return value
    if isinstance(value, str):
        return value if value.startswith(LOGICAL_PREFIX) else None
    if isinstance(value, Mapping) and "physical_uri" in value and "ref" in value:
        try:
            return ResultRef.model_validate(value)
        except ValidationError:
            return None
    return None
