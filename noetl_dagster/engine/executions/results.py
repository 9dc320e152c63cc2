"""The result of a step as one reference, which Dagster can point at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.envelopes import OK
from noetl_dagster.events.state import StepEnd
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier


async def reference_of(runtime: Runtime, execution_id: int, end: StepEnd) -> ResultRef:
    """The reference of a step's result; a small one that stands in the log gets one in the eventlog tier."""
    reference = end.envelope.get("ref")
    if reference is not None:
        return reference if isinstance(reference, ResultRef) else ResultRef.model_validate(reference)
    return await runtime.results.put(
        _value(end), execution_id=execution_id, step=end.step, name="result", tier=StoreTier.EVENTLOG
    )


async def value_of(runtime: Runtime, envelope: Mapping[str, Any]) -> Any:
    """A step's result itself, fetched where it is stored; of a loop the results of its items, in their order, and
    the envelope of one that failed."""
    reference = envelope.get("ref")
    if reference is not None:
        return await runtime.results.get(reference)
    if "results" in envelope and "data" not in envelope:
        items = envelope["results"]
        return [await value_of(runtime, item) if item.get("status") == OK else item for item in items]
    return envelope.get("data")


def _value(end: StepEnd) -> Any:
    if "results" in end.envelope and "data" not in end.envelope:
        return end.envelope["results"]
    return end.envelope.get("data")
