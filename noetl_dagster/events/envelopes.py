"""Results between their two forms: the envelope that templates see and the shape that the log checks.

An envelope is ``{status, data | ref, extracted, error, meta, http | pg | py, results}``. The log keeps
``{status, data | reference, extracted, context}``, where ``context`` holds whatever else the envelope has.
"""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ToolError, kind_of
from noetl_dagster.result_ref import ResultRef

Envelope = dict[str, Any]

OK = "ok"
ERROR = "error"
ERROR_MESSAGE_CHARACTERS = 2_000

_OWN = frozenset({"status", "data", "ref", "extracted"})


def to_result(envelope: Envelope) -> dict[str, Any]:
    """The form in which the log keeps an envelope."""
    result: dict[str, Any] = {"status": envelope["status"]}
    reference = envelope.get("ref")
    if reference is not None:
        result["reference"] = (
            reference.model_dump(mode="json", exclude_defaults=True)
            if isinstance(reference, ResultRef)
            else reference
        )
    elif "data" in envelope:
        result["data"] = envelope["data"]
    if envelope.get("extracted"):
        result["extracted"] = envelope["extracted"]
    context = {key: value for key, value in envelope.items() if key not in _OWN and value is not None}
    if context:
        result["context"] = context
    return result


def from_result(result: dict[str, Any] | None) -> Envelope:
    """The envelope that the log keeps under ``result``."""
    if result is None:
        return {"status": OK, "data": None}
    envelope: Envelope = {"status": result["status"]}
    if "reference" in result:
        envelope["ref"] = ResultRef.model_validate(result["reference"])
    elif "data" in result:
        envelope["data"] = result["data"]
    if "extracted" in result:
        envelope["extracted"] = result["extracted"]
    return envelope | (result.get("context") or {})


def error_part(error: BaseException, source: str | None = None) -> dict[str, Any]:
    """The ``error`` part of an envelope; ``source`` is the kind of the tool."""
    message = str(error) or type(error).__name__
    part: dict[str, Any] = {
        "kind": kind_of(error),
        "source": source,
        "message": message[:ERROR_MESSAGE_CHARACTERS],
        "retryable": bool(getattr(error, "retryable", False)),
        "status": getattr(error, "status", None),
        "code": getattr(error, "code", None),
    }
    return part


def error_envelope(error: BaseException, source: str | None = None) -> Envelope:
    """The envelope of a task that failed; ``source`` is the kind of its tool."""
    details = error.details if isinstance(error, ToolError) else {}
    return {"status": ERROR, "error": error_part(error, source)} | details
